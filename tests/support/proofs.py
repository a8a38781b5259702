"""Tests that a page names: that they exist, and the backends that they run on.

A reference is `test_ops.py::test_op`, or in a class
`test_tensor.py::TestWgpuBuffers::test_it_is_read_in_place`.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
BACKENDS = ("cpu", "simulator", "webgpu", "cuda")
HOST = "host"  # where a test that opens no device of the fixture's runs

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def _module(file: str) -> ast.Module:
    paths = list(TESTS.rglob(file))
    if len(paths) != 1:
        raise LookupError(f"{file}: no such file of tests, or more than one")
    return ast.parse(paths[0].read_text("utf-8"))


def _defined(body: list[ast.stmt], name: str) -> ast.stmt | None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return next((n for n in body if isinstance(n, kinds) and n.name == name), None)


def _marked(decorators: list[ast.expr]) -> frozenset[str] | None:
    """The backends of `@pytest.mark.devices(...)`."""
    for node in decorators:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.devices":
            names = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
            return frozenset(str(name).partition("-")[0] for name in names) or None
    return None


def _fixtures(function: Function, module: ast.Module) -> Iterator[str]:
    """What a test takes, and what the fixtures of its file take for it."""
    for argument in function.args.args:
        yield argument.arg
        fixture = _defined(module.body, argument.arg)
        if isinstance(fixture, Function):
            yield from _fixtures(fixture, module)


@functools.cache
def backends(reference: str) -> frozenset[str]:
    """The backends that a test runs on; `HOST` for one without a device.

    Raises:
        LookupError: there is no such test.
    """
    file, *path = reference.split("::")
    module = _module(file)
    body, marked = module.body, None
    node: ast.stmt | None = None
    for name in path:
        node = _defined(body, name)
        if isinstance(node, ast.ClassDef):
            body = node.body
        if isinstance(node, ast.ClassDef | Function):
            marked = _marked(node.decorator_list) or marked
    if not isinstance(node, Function) or not node.name.startswith("test_"):
        raise LookupError(f"{reference}: no such test")
    if "device" not in _fixtures(node, module):
        return frozenset({HOST})
    return frozenset(BACKENDS) if marked is None else marked
