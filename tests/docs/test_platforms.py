"""What docs/platforms.md says of dtypes is what the functions take, of CI what has run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.tensors import functional
from tests.support.api_sections import INTEGERS

PAGE = (Path(__file__).parents[2] / "docs" / "platforms.md").read_text(encoding="utf-8")


def row(name: str) -> str:
    """What the table of dtypes says of one."""
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {name} | yes |"))
    return line.split("|")[3].strip()


def operands(dtype: str) -> Iterator[tuple[Any, ...]]:
    """Arguments of every form that a public function has, the first of a dtype."""
    x = ct.asarray(np.ones((4, 4), np.int32), device="cpu").astype(dtype)
    where = ct.asarray(np.array([0, 1], np.int32), device="cpu")
    mask = ct.asarray(np.ones((4, 4), np.bool_), device="cpu")
    yield from (
        (x,),
        (x, x),
        (x[0], x[0]),
        (x, 0, 1),
        (mask, x, x),
        ([x, x],),
        (x, 2),
        (x, [2, 2]),
        (x, [4, 4]),
    )
    yield from ((x, where), (x, where, x[:2]), (where, x), (x.reshape(1, 1, 4, 4),) * 3)
    yield from (
        (x, where[None]),
        (x.reshape(1, 4, 4), where[:1]),
        (x.reshape(1, 4, 4), x.reshape(4, 4, 1)),
    )


def taken(dtype: str) -> set[str]:
    """The functions that take a dtype."""

    def takes(function: Callable[..., Any]) -> bool:
        for arguments in operands(dtype):
            try:
                function(*arguments)
            except (ct.CentellaError, TypeError, AttributeError, ValueError):
                continue
            return True
        return False

    return {n for n in functional.__all__ if takes(getattr(functional, n))} - {"rope_tables"}


@pytest.mark.parametrize("dtype", ["i32", "u32", "i8", "u8"])
def test_integers_have_the_operations_that_the_page_names(dtype: str) -> None:
    assert row("i32, u32").startswith("the [element-wise functions](api.md#element-wise) that take")
    named = {n for part in re.findall(r"`([a-z_ ]+)`", row("i32, u32")) for n in part.split()}
    named |= {*INTEGERS.split()} - {"cast"}
    assert taken(dtype) == named
    assert row("i8, u8").startswith("the same modulo 256; `sum` and `dot` give i32, u32.")
    x = ct.asarray(np.array([100, 100, 2], np.int32), device="cpu").astype(dtype)
    wide = {"i": "i32", "u": "u32"}[dtype[0]]
    assert ct.sum(x).dtype.name == ct.dot(x, x).dtype.name == wide
    product = (x * x).numpy().astype(np.int64)
    assert (product[0] - 10_000) % (256 if dtype.endswith("8") else 1 << 32) == 0


def test_floats_have_the_rest() -> None:
    """Masks and what makes tensors of numbers apart."""
    other = {"arange", "dequantize", "full", "zeros", "interleaved_to_head_first", "rope", "cast"}
    masks = {"logical_and", "logical_not", "logical_or"}
    integers = {"floor_divide", "remainder"}
    assert taken("f32") >= set(functional.__all__) - other - masks - integers - {"rope_tables"}


def test_the_page_says_of_ci_what_has_run() -> None:
    (line,) = (line for line in PAGE.splitlines() if line.startswith("| tested by `.ci/run`"))
    workflow = Path(__file__).parents[2] / ".github" / "workflows" / "ci.yml"
    untested = "this file has not run" in workflow.read_text(encoding="utf-8")
    assert ("workflow has not run" in line) is untested
