"""What `import centella` offers: names and docstrings."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
from pathlib import Path

import pytest

import centella

SRC = Path(__file__).parents[2] / "src" / "centella"
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@pytest.mark.parametrize("name", centella.__all__)
def test_public_name_exists_and_is_documented(name: str) -> None:
    assert hasattr(centella, name)
    assert inspect.getdoc(getattr(centella, name)), f"centella.{name} has no docstring"


def test_names_are_listed_once() -> None:
    assert len(set(centella.__all__)) == len(centella.__all__)


def test_init_defines_nothing() -> None:
    tree = ast.parse((SRC / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    nodes = tree.body[1:]
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.body + node.orelse  # what one of both is not to see, is held to the same
            continue
        names = [ast.unparse(t) for t in node.targets] if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AugAssign):
            names = [ast.unparse(node.target)]
        allowed = isinstance(node, ast.Import | ast.ImportFrom | ast.Delete) or names in (
            ["__all__"],
            ["__version__"],
        )
        assert allowed, f"__init__.py:{node.lineno} defines something: {ast.unparse(node)[:60]}"


def test_version_is_that_of_the_package() -> None:
    assert centella.__version__ == importlib.metadata.version("centella")


@pytest.mark.parametrize(
    "path", sorted(SRC.rglob("*.py")), ids=lambda p: p.relative_to(SRC).as_posix()
)
def test_public_functions_and_classes_are_documented(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "the module has no docstring"
    for node in tree.body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} (line {node.lineno}) has no docstring"
