"""wgpu-native's header without a parser: what is declared, what is kept, and what else may come."""

from __future__ import annotations

import builtins
import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from centella.host import caches

cffi: Any = pytest.importorskip("cffi")
pytest.importorskip("wgpu")
from centella.backends.webgpu import declarations  # noqa: E402

HEADER = """
#define MOST 0xffffffffffffffff
typedef struct thing { int a; struct thing *next; } Thing;
typedef enum { ONE = 1, TWO } Kind;
typedef void (*Callback)(Kind, void *);
int abs(int);
"""
MODULE = """
from cffi import FFI, __version_info__ as version
import math
other = None
ffi = FFI()
ffi.cdef({header!r})
{more}
ffi.set_source("a.h", None)
lib = ffi.dlopen(None)
second = FFI()

@ffi.callback("int(int)")
def back(x):
    return x + 1
"""
Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "centella"


@pytest.fixture
def new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Imports a package that declares a header as wgpu's does, as a new process would."""
    names = "likewgpu", "likewgpu._ffi"

    def forget() -> None:
        for name in names:
            sys.modules.pop(name, None)

    def import_(more: str = "", header: str = HEADER) -> Any:
        forget()
        root = tmp_path / names[0]
        root.mkdir(exist_ok=True)
        (root / "__init__.py").write_text("from likewgpu import _ffi\nfrom likewgpu._ffi import *")
        source = MODULE.format(header=header, more=more)
        if not (root / "_ffi.py").is_file() or (root / "_ffi.py").read_text() != source:
            (root / "_ffi.py").write_text(source)
        importlib.invalidate_caches()
        return declarations.import_native()

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(declarations, "NATIVE", names[0])
    monkeypatch.setattr(declarations, "DECLARING", names[1])
    yield import_
    forget()


def no_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    def cdef(self: Any, text: str) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(cffi.FFI, "cdef", cdef)


def check(module: Any) -> None:
    """What MODULE has, by whichever FFI."""
    ffi, lib = module.ffi, module.lib
    assert lib.abs(-3) == 3 and lib.MOST == 2**64 - 1 and lib.TWO == 2
    thing = ffi.new("Thing *", {"a": 5})
    thing.next = thing
    assert thing.next.a == 5 and module.back(3) == 4
    assert module.math.pi > 3 and module.other is None and module.version >= (1, 10)
    assert isinstance(module.second, cffi.FFI)
    inner = sys.modules["likewgpu._ffi"]
    assert type(inner.__loader__).__module__ == "_frozen_importlib_external"
    assert inner.__builtins__ == vars(builtins)
    assert not [f for f in sys.meta_path if isinstance(f, declarations.Finder)]


def test_a_header_is_parsed_once(new: Make, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = new()
    check(first)
    assert not isinstance(first.ffi, cffi.FFI)
    assert len(list(folder.iterdir())) == 1
    no_parse(monkeypatch)
    check(new())
    assert declarations.import_native() is sys.modules["likewgpu"]  # is not imported again


def test_another_header_is_another_file(new: Make, folder: Path) -> None:
    new()
    assert new(header=HEADER + "int labs(int);").lib.labs(-1) == 1
    assert len(list(folder.iterdir())) == 2
    names = {declarations.file_of(HEADER, version) for version in ("1.17.0", "2.0.0")}
    assert len(names) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "version"])
def test_a_file_that_we_did_not_write(
    new: Make, folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    data = json.dumps({"_version": 0x2501, "_types": ""}).encode()
    file.write_bytes({"cut": whole[:-5], "empty": b"", "other": b"x" * 99,
                      "version": hashlib.sha256(data).digest() + data}[damage])  # fmt: skip
    check(new())
    assert file.read_bytes() == whole
    no_parse(monkeypatch)
    check(new())


def test_a_folder_that_cannot_be_written(new: Make, folder: Path) -> None:
    folder.parent.write_text("no folder")
    for _ in range(2):
        check(new())


@pytest.mark.skipif(sys.platform == "win32", reason="has no such modes")
def test_a_file_that_others_may_write_is_not_read(new: Make, folder: Path) -> None:
    new()
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and caches.kept(file.name)
    file.chmod(0o620)
    assert caches.kept(file.name) is None
    check(new())
    assert file.stat().st_mode & 0o777 == 0o600  # written anew


@pytest.mark.skipif(sys.platform == "win32", reason="its folder is another variable's")
def test_without_a_cache_folder_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", str)
    monkeypatch.chdir(tmp_path)
    caches.keep("name", b"content")
    assert caches.kept("name") is None and not list(tmp_path.iterdir())


def test_meta_path_is_replaced_and_not_changed_in_place(
    new: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sys.meta_path
    finders = list(before)
    new()
    assert before == finders == sys.meta_path and sys.meta_path is not before


def test_a_cffi_that_cannot_write(new: Make, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cffi.recompiler

    monkeypatch.delattr(cffi.recompiler, "make_py_source")
    module = new()
    check(module)
    assert isinstance(module.ffi, cffi.FFI) and not folder.exists()


@pytest.mark.parametrize("more", [
    'ffi.cdef("int labs(int);")', 'ffi.cdef("int labs(int);", override=True)', "ffi.include(FFI())",
])  # fmt: skip
def test_a_wgpu_with_other_contents_is_parsed(new: Make, more: str) -> None:
    for _ in range(2):
        module = new(more)
        check(module)
        assert isinstance(module.ffi, cffi.FFI)


def test_an_error_while_wgpu_is_imported_is_raised(new: Make) -> None:
    with pytest.raises(RuntimeError, match="no library"):
        new("raise RuntimeError('no library')")
    assert not [f for f in sys.meta_path if isinstance(f, declarations.Finder)]


def test_declarations_without_a_parser_equal_the_parsers() -> None:
    """Every type, field, number and function of wgpu's header."""
    from wgpu.backends.wgpu_native import _ffi

    parsed = cffi.FFI()
    parsed.cdef(_ffi.get_wgpu_header())
    declarations.quicken(parsed)  # or it would parse 430 lines for each name
    written = declarations.ffi_of(declarations.written(parsed))
    by_parser, by_file = parsed.dlopen(_ffi.lib_path), written.dlopen(_ffi.lib_path)

    def spelled(kind: Any) -> str:  # cffi names a struct by its tag or by its typedef
        return str(kind.cname).replace("struct ", "").replace("enum ", "")

    def shown(kind: Any, opaque: bool) -> list[Any]:
        description = [spelled(kind), kind.kind]
        if kind.kind in ("struct", "union") and not opaque:
            description.append(parsed.sizeof(kind))
            description += [
                (n, spelled(f.type), f.offset, f.bitsize, f.flags) for n, f in kind.fields
            ]
        if kind.kind == "enum":
            description += [parsed.sizeof(kind), kind.elements]
        return description

    names = written.list_types()
    assert len(names[0]) > 200 and names == parsed.list_types()
    for name in (*names[0], *(f"struct {name}" for name in names[1])):
        theirs = parsed.typeof(name)
        opaque = theirs.kind == "struct" and theirs.fields is None  # cffi aborts if asked by a file
        assert shown(written.typeof(name), opaque) == shown(theirs, opaque), name
    assert dir(by_file) == dir(by_parser)
    compared = 0
    for name in dir(by_parser):
        try:
            theirs = getattr(by_parser, name)
        except (AttributeError, NotImplementedError):  # declared, not in the library; no number
            continue
        ours, compared = getattr(by_file, name), compared + 1
        if not isinstance(theirs, int):
            assert spelled(written.typeof(ours)) == spelled(parsed.typeof(theirs)), name
        else:
            assert ours == theirs, name
    assert compared > 500


def test_a_second_process_needs_no_parser(folder: Path) -> None:
    code = """
import sys
from centella.backends import webgpu
import centella as ct
if webgpu.adapters():
    device = ct.device("webgpu:0", pool="exact")
    assert (ct.ones(3, device=device) + 1).numpy().tolist() == [2, 2, 2]
print("pycparser" in sys.modules)
"""
    for expected in ("True", "False"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
            env=os.environ,
        )  # fmt: skip
        assert done.stdout.strip() == expected, done.stdout + done.stderr
        assert [f.name[:11] for f in folder.iterdir()] == ["wgpu-header"]
    assert caches.kept(next(folder.iterdir()).name)


# -- wgpu as it comes, imported before us ----------------------------------------------------------

TYPES = """
typedef struct thing { int a; struct thing *next; } Thing;
typedef struct opaque *Handle;
typedef enum { ONE = 1, TWO } Kind;
typedef uint32_t Flags;
typedef void (*Callback)(Kind, void *);
"""


@pytest.mark.parametrize("name", ["Thing", "Handle", "Kind", "Flags", "uint32_t", "char", "double"])
@pytest.mark.parametrize("suffix", ["", " *", "*", " * ", "[]", " []", "**", "[3]", " const *"])
def test_types_found_by_name_are_those_of_the_parser(name: str, suffix: str) -> None:
    plain, quick = cffi.FFI(), cffi.FFI()
    for ffi in (plain, quick):
        ffi.cdef(TYPES)
    declarations.quicken(quick)
    expected, got = plain.typeof(name + suffix), quick.typeof(name + suffix)
    assert (got.cname, got.kind) == (expected.cname, expected.kind)
    assert quick.typeof(got.cname) is got
    if "*" in suffix or "[3]" in suffix:
        assert quick.sizeof(got) == plain.sizeof(expected)
    with pytest.raises(cffi.CDefError):
        quick.typeof("Nothing *")


def test_a_wgpu_that_was_imported_before_is_not_parsed_for_each_type() -> None:
    code = """
import cffi.cparser, wgpu.backends.wgpu_native
from centella.backends import webgpu
parsed = []
parse = cffi.cparser.Parser.parse_type_and_quals
cffi.cparser.Parser.parse_type_and_quals = lambda s, text: (parsed.append(text), parse(s, text))[1]
import centella as ct
if webgpu.adapters():
    ct.device("webgpu:0")
print([text for text in parsed if "(" not in text])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
