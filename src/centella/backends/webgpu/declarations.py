"""wgpu-native's C header, parsed once on a machine.

wgpu has cffi parse 2 000 lines of C in every process that imports it, and its names again for each
type that is used later: half a second and more, the larger part of a start. What the parser finds
depends on the text alone, and cffi can write it down for modules that are to need no parser
("out-of-line, ABI mode"). That is done here, and what was written is kept in the user's cache
folder, as data, by the header's text, cffi, Python and platform.

wgpu's own module runs as it is, from its own file, and opens its own library: only the `FFI()` that
it makes is given declarations so. Whatever is not as expected here goes through the parser.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import json
import os
import re
import sys
import tempfile
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

from centella.host.caches import keep, kept
from centella.host.log import logger

NATIVE = "wgpu.backends.wgpu_native"
NAME = "wgpu"
DECLARING = f"{NATIVE}._ffi"  # the module that makes an FFI() and has it parse the header
TYPE: re.Pattern[str] = re.compile(r"\s*(\w+)\s*(\*|\[\s*\])?\s*")


def import_native() -> Any:
    """wgpu's module of native calls; where it is already imported, as it is."""
    if NATIVE in sys.modules:
        return importlib.import_module(NATIVE)  # which waits where another thread is at it
    finder: Any = Finder(DECLARING)
    sys.meta_path = [finder, *sys.meta_path]  # never changed in place: other threads go through it
    try:
        return importlib.import_module(NATIVE)
    except Exception as error:  # this wgpu asks for what declarations without a parser have not
        _log("wgpu's header goes through the parser: %s", error)
        for name in [n for n in list(sys.modules) if n.startswith(NATIVE)]:
            del sys.modules[name]
    finally:
        sys.meta_path = [f for f in sys.meta_path if f is not finder]
    return importlib.import_module(NATIVE)


class Finder:
    """Finds one module as Python does, and runs it so that its first `cffi.FFI()` is a `Header`."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._loader: Any = None
        self._header: Header | None = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Where the module is; None for every other."""
        spec = PathFinder.find_spec(name, path, target) if name == self._module else None
        if spec is None or not hasattr(spec.loader, "get_code"):
            return None
        self._loader, spec.loader = spec.loader, self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """As Python makes modules."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's own code, in which the name `cffi` alone means something else."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        scope = module.__dict__
        scope["__builtins__"] = {**vars(builtins), "__import__": self._import}
        exec(self._loader.get_code(module.__name__), scope)
        scope["__builtins__"] = vars(builtins)
        if self._header is not None:
            for name in [n for n, value in scope.items() if value is self._header]:
                scope[name] = self._header.ffi

    def _import(self, name: str, *rest: Any) -> Any:
        module = builtins.__import__(name, *rest)
        if name != "cffi":
            return module

        def new_ffi() -> Any:
            if self._header is not None:
                return module.FFI()
            self._header = Header(module)
            return self._header

        return SimpleNamespace(**{**vars(module), "FFI": new_ffi})


class Header:
    """A new `FFI()` until it is told what it declares; then whatever cffi has for that.

    Attributes:
        ffi: cffi's own object: without a parser, or with one where that could not be. None so far.
    """

    def __init__(self, cffi: Any) -> None:
        self._cffi = cffi
        self.ffi: Any = None

    def cdef(self, csource: str) -> None:
        """Declare what a text of C declares."""
        if self.ffi is not None:
            self.ffi.cdef(csource)
            return
        file = file_of(csource, self._cffi.__version__)
        self.ffi = ffi_of(kept(file))
        if self.ffi is None:
            parsed = self._cffi.FFI()
            parsed.cdef(csource)
            content = written(parsed)
            self.ffi = ffi_of(content) or parsed
            if self.ffi is not parsed:
                keep(file, content)

    def set_source(self, *args: Any) -> None:
        """Say what is to be written: without a parser, nothing more."""
        if isinstance(self.ffi, self._cffi.FFI):
            self.ffi.set_source(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ffi, name)


def file_of(csource: str, version: str) -> str:
    """The file for the declarations of a text, by a version of cffi and this Python."""
    about = (csource, version, sys.implementation.cache_tag, sys.hexversion, sys.platform,
             sys.maxsize)  # fmt: skip
    return f"wgpu-header-{hashlib.sha256(repr(about).encode()).hexdigest()[:32]}.bin"


def written(ffi: Any) -> bytes:
    """The declarations of an FFI that has parsed them, as data: a digest and JSON."""
    try:
        from cffi.recompiler import make_py_source

        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "declarations.py")
            make_py_source(ffi, NAME, path)
            with open(path, encoding="utf-8") as file:
                statement = ast.parse(file.read()).body[-1]
        call: Any = statement.value if isinstance(statement, ast.Assign) else statement
        if ast.unparse(call.func) != "_cffi_backend.FFI" or ast.literal_eval(call.args[0]) != NAME:
            raise ValueError("cffi writes something else")
        named = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
        data = json.dumps(named, default=_text).encode()
    except Exception as error:  # of a folder, or of a cffi that has changed
        _log("wgpu's header is not kept: %s", error)
        return b""
    return hashlib.sha256(data).digest() + data


def ffi_of(content: bytes | None) -> Any:
    """An FFI with written declarations; None for what nobody wrote whole."""
    if not content or hashlib.sha256(content[32:]).digest() != content[:32]:
        return None
    try:
        named = {k: _bytes(v) for k, v in json.loads(content[32:]).items()}
        return importlib.import_module("_cffi_backend").FFI(NAME, **named)
    except Exception as error:  # of cffi, which looks at the format's version
        _log("wgpu's header as kept: %s", error)
        return None


def quicken(ffi: Any) -> None:
    """Let an `ffi` with a parser find declared names without it; one that has none stays as it is.

    For a wgpu that was imported before this library, or as it comes. For each name of a type that
    is new to it cffi parses a text which declares every name of the header. A declared name, a
    pointer to one and an array of one are put together here from what cffi has parsed already.
    """
    try:
        from cffi import model

        parser = ffi._parser
        slow, declared, pointer_to = (
            parser.parse_type, parser._declarations, parser._get_type_pointer,
        )  # fmt: skip
        primitive = model.PrimitiveType.ALL_PRIMITIVE_TYPES
    except (ImportError, AttributeError):
        return

    def parse_type(text: str) -> Any:
        match = TYPE.fullmatch(text)
        name = match[1] if match else ""
        known = (model.PrimitiveType(name), 0) if name in primitive else None
        known = declared.get(f"typedef {name}", known)
        if match is None or known is None:
            return slow(text)
        kind, quals = known
        if match[2] is None:
            return kind
        return pointer_to(kind, quals) if match[2] == "*" else model.ArrayType(kind, None)

    parser.parse_type = parse_type


def _text(value: Any) -> str:
    """Bytes as JSON has them."""
    if not isinstance(value, bytes):
        raise TypeError(f"expected bytes, got {type(value).__name__}")
    return value.decode("latin-1")


def _bytes(value: Any) -> Any:
    """What `_text` and JSON made of bytes, tuples and numbers."""
    if isinstance(value, str):
        return value.encode("latin-1")
    return tuple(map(_bytes, value)) if isinstance(value, list) else value


def _log(text: str, error: Exception) -> None:
    logger("webgpu").debug(text, error)
