"""What the pages name exists: the targets of links, files, tests, and names of the code."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import centella as ct
from centella import lang, nn
from tests.support.proofs import backends

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "centella"
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
# Pages on which everything between backticks is of the code.
ABOUT_CODE = [ROOT / "CONTRIBUTING.md", DOCS / "architecture.md", DOCS / "kernels.md",
              *sorted(DOCS.glob("rooms/*.md")), *sorted(DOCS.glob("howto/*.md"))]  # fmt: skip
FOLDERS = ("src/", "tests/", "docs/", "benchmarks/", "examples/", ".ci/", ".github/")
FILE = re.compile(r"[\w./<>-]*\w\.(?:py|md|toml|json|yml)|(?:[\w.<>]+/)+")
NAME = re.compile(r"[A-Za-z_][\w.]*\w(?:\(\))?")
PUBLIC = re.compile(r"(?<![\w.])(?:ct|nn|lang)(?:\.[A-Za-z_]\w*)+")
FOREIGN = {"config.json", "tokenizer.json", "cube"}  # of a model's folder; what a reader adds


def ids(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def coded(page: Path) -> Iterator[str]:
    """What stands between backticks, line ends as spaces."""
    for text in re.findall(r"`([^`]+)`", prose(page)):
        yield " ".join(text.split())


def anchors(page: Path) -> set[str]:
    """What a link into a page may name, as GitHub derives it from headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@functools.cache
def words() -> frozenset[str]:
    """Every word of the code, its tests and its settings."""
    files = [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), ROOT / "pyproject.toml"]
    texts = (p.read_text("utf-8") for p in files if p != Path(__file__))
    return frozenset(w for text in texts for w in re.findall(r"\w+", text))


def is_public(name: str) -> bool:
    """Whether `ct.something`, `nn.something` or `lang.something` is there."""
    root, _, rest = name.partition(".")
    try:
        operator.attrgetter(rest)({"ct": ct, "nn": nn, "lang": lang}[root])
    except AttributeError:
        return False
    return True


@functools.cache
def is_file(name: str) -> bool:
    """Whether a path leads somewhere: from the root, from the package, or from a folder below."""
    if "<" in name:  # a name that the reader chooses
        name = name.partition("<")[0].rpartition("/")[0]
    name = name.rstrip("/")
    return (ROOT / name).exists() or any(
        any(folder.rglob(name)) for folder in (ROOT / "src", DOCS, ROOT / "benchmarks")
    )


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    for file, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text("utf-8")):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_and_tests_exist(page: Path) -> None:
    for text in coded(page):
        file, _, test = text.partition("::")
        if FILE.fullmatch(file) and (page in ABOUT_CODE or file.startswith(FOLDERS)):
            assert file in FOREIGN or is_file(file), text
        if test:
            assert backends(f"{file.rpartition('/')[2]}::{test}"), text


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_public_names_exist(page: Path) -> None:
    missing = [n for text in coded(page) for n in PUBLIC.findall(text) if not is_public(n)]
    assert missing == []


@pytest.mark.parametrize("page", ABOUT_CODE, ids=ids)
def test_names_of_the_code_exist(page: Path) -> None:
    named = (
        t.removesuffix("()") for t in coded(page) if NAME.fullmatch(t) and not FILE.fullmatch(t)
    )
    unknown = {name for name in named if not words().issuperset(name.split("."))}
    assert unknown <= FOREIGN


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_options_and_variables_exist(page: Path) -> None:
    typer = pytest.importorskip("typer")
    from centella.cli.app import build

    root = typer.main.get_command(build())
    text = page.read_text("utf-8").replace("\\\n", " ")
    # Of a shell's line, or of code in a sentence: the command, and what follows of the line.
    for name, rest in re.findall(
        r"(?:^|`|\$ |&& )centella ([a-z]\w*)([^`\n]*)", text, re.MULTILINE
    ):
        known = {option for p in (*root.params, *root.commands[name].params) for option in p.opts}
        assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", rest)) <= known, name + rest
    assert set(re.findall(r"CENTELLA_\w+", text)) <= words()


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_examples_are_linked(page: str) -> None:
    assert re.search(r"\]\((\.\./)?examples\)", (ROOT / page).read_text("utf-8"))


def test_what_is_not_there_is_reported(tmp_path: Path) -> None:
    assert is_file("src/centella/models/<family>.py") and is_file("skinny.py") and is_file("cpu.py")
    assert is_public("ct.Tensor.numpy") and not is_public("ct.Tensor.nothing")
    assert not is_file("models/nothing.py") and not is_file("nothing/")
    assert anchors(ROOT / "README.md") >= {"install", "how-fast"}
    page = tmp_path / "page.md"
    page.write_text("# A title: it\n\n`a\nb` and\n\n```\n`not this`\n```\n", "utf-8")
    assert list(coded(page)) == ["a b"]
    assert anchors(page) == {"a-title-it"}
    with pytest.raises(LookupError, match="no such test"):
        backends("test_links.py::test_nothing")
