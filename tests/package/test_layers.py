"""The arrows of the house: which room may import which, read from the source with `ast`.

A room is a file or folder directly under `src/centella`. An import runs at import time, late
(inside a function) or for type checkers only. Import-time and typing imports follow the arrows;
late ones, whatever they import, stand in `LATE` with the reason.
"""

from __future__ import annotations

import ast
import graphlib
import itertools
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "centella"

# Each room and the rooms directly below it; what those may import, it may import too.
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "host": {"errors"},
    "dtypes": {"errors"},
    "specs": {"dtypes"},
    # how a kernel is written, and what becomes of it
    "lang": {"specs", "host"},
    "emit": {"lang"},
    "simulator": {"lang"},
    # what an operation is, and the operations
    "op": {"emit"},
    "ops": {"op"},
    # what happened; bytes and programs on a device
    "ledger": {"host"},
    "backends": {"emit", "simulator", "ledger"},
    # what was asked for, what is to run, running it
    "record": {"op", "backends"},
    "plan": {"record", "ops"},
    "runtime": {"plan"},
    # what users hold
    "tensors": {"runtime"},
    "nn": {"tensors"},
    "weights": {"dtypes", "host"},
    "models": {"nn", "weights"},
    "audio": {"tensors"},
    "tasks": {"models", "audio"},
    "serving": {"tasks"},
    "check": {"tasks", "__init__"},
    "cli": {"check", "__init__"},
    "lookup": {"serving", "tasks"},
    "__init__": {"lookup"},
    "__main__": {"cli"},
    "__pyinstaller": {"backends", "lookup"},
}

# The same of the rooms in `tasks/`; its own files stand above them.
TASKS: dict[str, set[str]] = {
    "chat": set(),
    "text": {"chat"},
    "embed": {"text"},
    "classify": {"embed"},
    "generate": {"text"},
    "schedule": {"generate"},
    "transcribe": {"generate"},
}

ANY = "*"

# Late imports: (who, what) and why it waits.
LATE: dict[tuple[str, str], str] = {
    ("runtime", "runtime"): "passes load with the first device, the GPU check with its first use",
    ("runtime", "tensors"): "device.batch() and device.compile() give what is built on devices",
    ("backends", "cffi"): "what its parser found is written once on a machine, or asked for",
    ("audio", "soundfile"): "extra `audio`",
    ("audio", "soxr"): "extra `audio`",
    ("audio", "av"): "extra `av`",
    ("audio", "onnxruntime"): "extra `silero`",
    ("audio", "audio"): "only ffmpeg is a process, and subprocess takes long to load",
    ("tasks", "tasks"): "the sandbox loads with the first template, readers with the first GGUF",
    ("weights", "weights"): "files of torch.save need zipfile and pickletools, and few models have "
    "one",
    ("weights", "huggingface_hub"): "extra `models`",
    ("weights", "pyarrow"): "extra `arrow`",
    ("weights", "difflib"): "only a name that is wrong is compared with others",
    ("tasks", "tokenizers"): "extra `models`",
    ("cli", "readline"): "only a chat edits lines; Windows has none",
    ("tasks", "rich"): "extra `cli`, and only for a progress bar",
    ("lang", "hashlib"): "loads OpenSSL, and only a kernel's identity needs it",
    ("host", "logging"): "a message is rare, and the first costs as much as five of our modules",
    ("host", "concurrent"): "as logging, which it loads; and the hooks of a fork have an order",
    ("host", "asyncio"): "only a coroutine needs an event loop",
    ("tensors", "simulator"): "the simulator loads with the first kernel that runs in it",
    ("cli", "cli"): "typer may be missing; rich takes longer to load than a short text to embed",
    ("cli", "check"): "--help and the other subcommands do without the cases",
    ("cli", "hashlib"): "as of lang, and only the demo needs it",
    ("cli", "importlib"): "`importlib.metadata` takes as long as typer, and `info` alone reads it",
    ("__pyinstaller", ANY): "a function that runs in a process of its own",
}

# Late imports that close a circle of files, and why it stays; there is no other circle.
CIRCLES: dict[tuple[str, str], str] = {
    ("runtime.device", "tensors.batch"): "device.batch() gives what is built on devices",
    ("runtime.device", "tensors.jit"): "device.compile() does, too",
}

# Files that name one another in type hints, beside imports that run, and why.
TYPED: dict[frozenset[str], str] = {
    frozenset({"nn.module", "nn.checkpoint", "nn.planes"}): "what loads a Module names it",
    frozenset(
        {
            "tasks.embed.embedder",
            "tasks.embed.forward",
            "tasks.embed.embeddings",
            "tasks.embed.replicas",
        }
    ): ("an Embedder gives its work to these, which ask it for the model and its config"),
    frozenset({"tasks.transcribe.transcriber", "tasks.transcribe.transcription"}): (
        "a Transcriber begins a Transcription, which takes its sessions"
    ),
}

# Packages beyond the standard library that a room or file may import when it is imported itself.
# `runtime` imports backends late, so their drivers load only then.
# `cli` is imported by the command line alone, which looks for both first.
EAGER: dict[str, set[str]] = {
    ANY: {"numpy", "msgspec"},
    "backends": {"wgpu", "cuda"},
    "cli": {"typer", "rich"},
    "__pyinstaller": {"PyInstaller"},  # which loads it, and nobody else
    "ledger": {"pytest"},  # the fixture's module, which pytest alone loads
    "tasks.chat.sandbox": {"jinja2"},  # which loads with the first template
}


@dataclass(frozen=True)
class Import:
    """One import statement: where, what it names and when it runs."""

    path: Path
    line: int
    target: str
    when: str  # "import", "late" or "typing"

    @property
    def room(self) -> str:
        """The room that imports."""
        first = self.path.relative_to(SRC).parts[0]
        return first.removesuffix(".py")

    @property
    def file(self) -> str:
        """The file that imports, as a module of the library."""
        return module_name(self.path).removeprefix("centella.")

    @property
    def inside(self) -> str | None:
        """The room imported, or None for a foreign package."""
        parts = self.target.split(".")
        if parts[0] != "centella":
            return None
        return parts[1] if len(parts) > 1 else "__init__"

    @property
    def what(self) -> str:
        """The room or foreign package imported."""
        return self.inside or self.target.split(".")[0]

    def __str__(self) -> str:
        return f"{self.path.relative_to(SRC)}:{self.line} imports {self.target} ({self.when})"


def module_name(path: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def targets(node: ast.Import | ast.ImportFrom, path: Path) -> list[str]:
    """The modules that an import statement names, absolute; submodules where they are files."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = ["centella", *path.relative_to(SRC).parts[:-1]]
        kept = package[: len(package) - node.level + 1]
        base = ".".join([*kept, base] if base else kept)
    names = [f"{base}.{alias.name}" for alias in node.names]
    return [name if is_module(name) else base for name in names]


def is_module(name: str) -> bool:
    """Whether a dotted name is a file or folder of the library, or a room it may get."""
    parts = name.split(".")
    if parts[0] != "centella":
        return False
    where = SRC.joinpath(*parts[1:])
    room = len(parts) == 2 and parts[1] in BELOW
    return room or where.is_dir() or where.with_suffix(".py").is_file()


TYPING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def read_imports(source: str, path: Path) -> list[Import]:
    """Every import in the source of one file."""
    entries: list[Import] = []

    def visit(node: ast.AST, when: str) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = dict.fromkeys(targets(node, path))
            entries.extend(Import(path, node.lineno, name, when) for name in names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in TYPING:
            for guarded in node.body:
                visit(guarded, "typing")
            for other in node.orelse:
                visit(other, when)
        else:
            late = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                visit(child, "late" if late else when)

    visit(ast.parse(source), "import")
    return entries


def reach(room: str, below: dict[str, set[str]]) -> set[str]:
    """Every room that a room may import: itself and all below it."""
    seen, todo = {room}, [room]
    while todo:
        new = below[todo.pop()] - seen
        seen |= new
        todo.extend(new)
    return seen


FILES = sorted(SRC.rglob("*.py"))


@cache
def imports() -> list[Import]:
    """Every import of the library."""
    return [i for path in FILES for i in read_imports(path.read_text(encoding="utf-8"), path)]


def inside() -> list[Import]:
    """Those of the library's own files."""
    return [i for i in imports() if i.inside is not None]


def foreign() -> list[Import]:
    """Those of packages of others."""
    return [i for i in imports() if not i.inside and i.what not in sys.stdlib_module_names]


def test_the_arrows_have_no_circle() -> None:
    graphlib.TopologicalSorter(BELOW).prepare()
    graphlib.TopologicalSorter(TASKS).prepare()


@pytest.mark.parametrize("room", sorted({p.relative_to(SRC).parts[0] for p in FILES}))
def test_every_room_is_on_the_map(room: str) -> None:
    assert room.removesuffix(".py") in BELOW, f"give {room} its place in BELOW"


def test_imports_follow_the_arrows() -> None:
    wrong = [
        str(i)
        for i in inside()
        if i.when != "late" and i.room in BELOW and i.inside not in reach(i.room, BELOW)
    ]
    assert not wrong, "\n".join(wrong)


def in_tasks(module: str) -> str:
    """The room in `tasks/` that a module is in; "" where it is in none."""
    first, *more = module.removeprefix("centella.").split(".")
    return more[0] if first == "tasks" and more and more[0] in TASKS else ""


def test_imports_within_tasks_follow_the_arrows() -> None:
    """Late ones too: none needs to go the other way."""
    assert {p.parent.name for p in (SRC / "tasks").glob("*/__init__.py")} == TASKS.keys()
    wrong = [
        str(i)
        for i in inside()
        if i.inside == "tasks"
        and in_tasks(i.file)
        and in_tasks(i.target) not in reach(in_tasks(i.file), TASKS)
    ]
    assert not wrong, "\n".join(wrong)


def test_late_imports_are_named_with_a_reason() -> None:
    late = [i for i in imports() if i.when == "late"]
    unnamed = [str(i) for i in late if not LATE.keys() & {(i.room, i.what), (i.room, ANY)}]
    assert not unnamed, "\n".join(unnamed)
    assert len(late) < 40
    rows = {row for i in late for row in ((i.room, i.what), (i.room, ANY))}
    assert LATE.keys() <= rows, f"no such import: {LATE.keys() - rows}"


def test_import_time_loads_numpy_msgspec_and_nothing_heavier() -> None:
    wrong = [
        str(i)
        for i in foreign()
        if i.when == "import"
        and i.what not in EAGER[ANY] | EAGER.get(i.room, set()) | EAGER.get(i.file, set())
    ]
    assert not wrong, "\n".join(wrong)


def test_files_import_in_no_circle_but_those_with_a_reason() -> None:
    graph: dict[str, set[str]] = {module_name(path): set() for path in FILES}
    unused = set(CIRCLES)
    for i in inside():
        who = module_name(i.path)
        edge = who.removeprefix("centella."), i.target.removeprefix("centella.")
        unused.discard(edge)
        if i.when != "typing" and i.target != who and not (i.when == "late" and edge in CIRCLES):
            graph[who].add(i.target)
    graphlib.TopologicalSorter(graph).prepare()
    assert unused == set()


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The groups of files in which each reaches every other."""

    def reached(name: str) -> set[str]:
        seen, todo = set[str](), [name]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo.extend(new)
        return seen

    below = {name: reached(name) for name in graph}
    groups = (
        frozenset(other for other in names if name in below[other])
        for name, names in below.items()
        if name in names
    )
    return {frozenset(n.removeprefix("centella.") for n in group) for group in groups}


def test_files_name_one_another_in_hints_only_with_a_reason() -> None:
    graph: dict[str, set[str]] = {module_name(path): set() for path in FILES}
    for i in inside():
        who = module_name(i.path)
        if i.when != "late" and i.target != who:
            graph[who].add(i.target)
    assert circles(graph) == TYPED.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from centella.dtypes import f32", ["centella.dtypes import"]),
        ("from centella import errors, op", ["centella.errors import", "centella.op import"]),
        ("from . import errors", ["centella.errors import"]),
        ("from .dtypes import f32, u32", ["centella.dtypes import"]),
        ("if TYPE_CHECKING:\n import centella.op", ["centella.op typing"]),
        ("if not TYPE_CHECKING:\n import centella.op", ["centella.op import"]),
        ("class A:\n def f(self):\n  import wgpu", ["wgpu late"]),
    ],
)
def test_the_reader_of_imports(text: str, expected: list[str]) -> None:
    entries = read_imports(text, SRC / "op.py")
    assert [f"{i.target} {i.when}" for i in entries] == expected


def test_the_picture_of_the_rooms() -> None:
    """docs/architecture.md draws the arrows between rooms, but for the package's entry points."""
    text = (SRC.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = text.partition("graph TD\n")[2].partition("```")[0]
    chains = [line.split(" --> ") for line in picture.split("\n") if line.strip()]
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, chains))
    drawn = {(a.strip(), b.strip()) for a, b in pairs}
    left = {"__init__", "__main__", "__pyinstaller", "lookup", "errors"}
    arrows = {(a, b) for a, below in BELOW.items() for b in below if not {a, b} & left}
    assert drawn == arrows
