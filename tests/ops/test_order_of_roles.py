"""Kernels whose roles meet by barriers in shared memory: each step that orders them is needed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from centella.emit.program import Call, Kernel
from centella.errors import SimulationError
from centella.ops.matmul import (
    streamed_kernel,
    streamed_many,
    streamed_rows,
    wgmma,
    whole_rows,
)
from centella.ops.quant import digits_kernel
from centella.ops.quant import streamed as streamed_blocks
from centella.ops.quant.digits import STREAMED_DIGITS
from centella.simulator.run import simulate
from centella.specs import Spec
from tests.ops import test_streamed_blocks, test_streamed_rows, test_wgmma, test_whole_rows
from tests.support.attention import CAPS
from tests.support.launched import laid_out, parameters, traced
from tests.support.mutations import changed

Build = Callable[[], tuple[Call, list[Spec]]]
Change = tuple[str, str]
AROUND = "            for k in range(share // DEPTH):\n"  # products of a stage
OF_LINES = "            for sixteen in range(share // DEPTH):\n"  # the same, of one row
RELEASE = """\
            with lang.if_(lane == 0):
                shared.empty.arrive(stage)
"""
RUN = "            self._run(rows, step * shared.tile.across + self.part, stage)\n"
OF_DIGITS = "            self._multiply(rows, turns * crews + self.crew, stage)\n"
OF_TILES = """\
        with lang.if_(leader & (step > 0)):
            shared.empty.arrive(before)
"""
OF_WHOLE_ROWS = """\
            with lang.if_(leader & (step > 0)) if half == 0 else lang.if_(leader):
                shared.release(before)
"""


def of_rows() -> tuple[Call, list[Spec]]:
    call, specs = test_streamed_rows.product_of(16, 270, 648)
    return test_streamed_rows.in_few_groups(call), list(specs)


def of_rows_apart() -> tuple[Call, list[Spec]]:
    call, specs = test_streamed_rows.product_of(16, 30, 648)
    assert dict(call.constants)["tile"].flight
    return call, list(specs)


def of_many() -> tuple[Call, list[Spec]]:
    caps = replace(CAPS, max_shared=64 << 10)  # so that tiles come in turn, and a ring comes round
    call, specs = test_streamed_rows.product_of(64, 5000, 648, caps=caps)
    assert dict(call.constants)["tile"].parts == 1
    return call, list(specs)


def of_parts() -> tuple[Call, list[Spec]]:
    call, specs = test_streamed_rows.product_of(64, 41, 1024)
    assert dict(call.constants)["tile"].parts == call.groups // 2 == 4
    return call, list(specs)


def of_normed() -> tuple[Call, list[Spec]]:
    call, specs = test_streamed_rows.product_of(5, 270, 648, "norm")
    return test_streamed_rows.in_few_groups(call), list(specs)


def of_layered() -> tuple[Call, list[Spec]]:
    call, specs = test_streamed_rows.product_of(5, 270, 648, "norm", "shift", kind="layer")
    return test_streamed_rows.in_few_groups(call), list(specs)


def of_one_row() -> tuple[Call, list[Spec]]:
    call, specs = test_streamed_rows.product_of(1, 530, 648)
    return call, list(specs)


def of_blocks() -> tuple[Call, list[Spec]]:
    (call,), specs = test_streamed_blocks.product_of("q8_0", 16, 530, 1152)
    return call, specs


def of_digits() -> tuple[Call, list[Spec]]:
    caps = replace(CAPS, max_shared=44 << 10)  # so that a ring comes round within a block
    (call,), specs = test_streamed_blocks.product_of(
        "q8_0", 1, 100, 4096, caps=caps, variant=STREAMED_DIGITS
    )
    assert dict(call.constants)["tile"].stages < 16
    return call, specs


def of_many_digits() -> tuple[Call, list[Spec]]:
    (call,), specs = test_streamed_blocks.product_of("q5_k", 1, 4300, 256, variant=STREAMED_DIGITS)
    assert dict(call.constants)["tile"].slots == 2
    return call, specs


def of_tiles() -> tuple[Call, list[Spec]]:
    launch, _ = test_wgmma.lowered(130, 300, 520)
    return launch.call, [launch.a, launch.b, launch.call.tensors[-1].spec]


def of_whole_rows() -> tuple[Call, list[Spec]]:
    asked = test_whole_rows.form(300, 64, 264, extras=())
    call, _ = test_whole_rows.launched(asked)
    return call, [*asked.inputs, *asked.outputs]


OF_LAST = """\
        with lang.if_(leader):
            shared.empty.arrive(last)
"""
DONE = "        lang.ptx.wgmma_wait(0)\n"
FINISH = "        if sums is not None:"
WAIT = "lang.ptx.wgmma_wait(1)\n"
OF_BLOCKS = RELEASE.replace("lane", "self.lane")
READ, WRITTEN = "race: written here, read by", "race: read here, written by"
COMES, EARLY = "race: a box comes here, read by", "read before a thread has waited for its box"
UNWRITTEN = "read, but nobody wrote it"
KEPT = """\
        with lang.if_(self.lane == 0):
            shared.read.arrive(slot)
"""
STEPS = "        for step in lang.range(lang.const(shared.steps, u32)):\n            stage = self"
IN_TURN = "        for turns in lang.range("
LOADED = "partial(meet, shared.met, turn))\n"
TOLD = "shared.told.wait(slot, self.beside.parity)\n"
# The launch, its kernel's module, what stands elsewhere or nowhere, the race.
CASES: dict[str, tuple[Build, ModuleType, list[Change], str]] = {
    "sums are overwritten": (
        of_rows, streamed_rows, [("meet(shared.met, turn)  # sums are written anew\n", "\n")], READ,
    ),
    "sums are read": (
        of_rows, streamed_rows, [("meet(shared.met, turn)\n        store", "store")], WRITTEN,
    ),
    "a stage is released": (
        of_rows, streamed_rows, [(RELEASE, ""), (AROUND, RELEASE + AROUND)], COMES,
    ),
    "the last stage of many rows is released": (
        of_many, streamed_many, [(DONE + OF_LAST, OF_LAST), (FINISH, DONE + FINISH)], COMES,
    ),
    "sums of parts are read": (
        of_parts, streamed_many, [("self._there.wait(0, 0)\n", "\n")], UNWRITTEN,
    ),
    "weights of a norm are read": (
        of_normed, streamed_rows,
        [(LOADED + "        meet(shared.met, turn)\n", LOADED)], UNWRITTEN,
    ),
    "weights of a layer norm are read": (
        of_layered, streamed_rows,
        [(LOADED + "        meet(shared.met, turn)\n", LOADED)], UNWRITTEN,
    ),
    "the largest weight is read": (
        of_layered, streamed_rows, [(LOADED, "lambda: None)\n")], WRITTEN,
    ),
    "moments of a layer norm are overwritten": (
        of_layered, streamed_rows, [("meet(shared.met, turn)  # sums are written anew\n", "\n")],
        READ,
    ),
    "sums of one row are read": (
        of_one_row, streamed_kernel,
        [("meeting()\n        outputs.store(", "outputs.store(")], WRITTEN,
    ),
    "a stage of one row is released": (
        of_one_row, streamed_kernel, [(RELEASE, ""), (OF_LINES, RELEASE + OF_LINES)], COMES,
    ),
    "planes are read": (
        of_blocks, streamed_blocks, [(TOLD, "\n")], EARLY,
    ),
    "sums of blocks are overwritten": (
        of_blocks, streamed_blocks,
        [("meet(shared.met, turn)  # sums are written anew\n", "\n")], READ,
    ),
    "a stage of blocks is released": (
        of_blocks, streamed_blocks, [(RUN + OF_BLOCKS, OF_BLOCKS + RUN)], COMES,
    ),
    "planes of one row are read": (of_digits, digits_kernel, [(TOLD, "\n")], EARLY),
    "digits are read": (
        of_many_digits, digits_kernel,
        [("vectors, meeting)\n    meeting()\n", "vectors, meeting)\n")], WRITTEN,
    ),
    "sums of digits are read": (
        of_digits, digits_kernel, [("of_two)\n        meeting()\n", "of_two)\n")], WRITTEN,
    ),
    "planes of blocks are released": (
        of_blocks, streamed_blocks, [(KEPT, ""), (STEPS, KEPT + STEPS)], COMES,
    ),
    "planes of one row are released": (
        of_many_digits, digits_kernel, [(KEPT, ""), (IN_TURN, KEPT + IN_TURN)], COMES,
    ),
    "sums of digits are those of two blocks": (
        of_many_digits, digits_kernel,
        [("of_two = turn.get() % 2", "of_two = lang.const(0, u32)")], WRITTEN,
    ),
    "rows of x that come apart are there": (
        of_rows_apart, streamed_rows, [("            rows.wait(stage, ring.parity)\n", "")], EARLY,
    ),
    "a stage of digits is released": (
        of_digits, digits_kernel, [(OF_DIGITS + OF_BLOCKS, OF_BLOCKS + OF_DIGITS)], COMES,
    ),
    "a stage of tiles is released": (
        of_tiles, wgmma, [(8 * " " + WAIT + OF_TILES, OF_TILES + 8 * " " + WAIT)], COMES,
    ),
    "a piece of whole rows is released": (
        of_whole_rows, whole_rows,
        [(12 * " " + WAIT + OF_WHOLE_ROWS, OF_WHOLE_ROWS + 12 * " " + WAIT)], COMES,
    ),
}  # fmt: skip


def run(call: Call, specs: list[Spec]) -> None:
    """Run a launch in few groups, so that each takes several blocks."""
    rng, ir = np.random.default_rng(0), traced(call)
    arrays: list[Any] = [test_streamed_blocks.filled(rng, spec) for spec in specs[:-1]]
    words = [laid_out(a, spec) for a, spec in zip(arrays, specs, strict=False)]
    words.append(laid_out(None, specs[-1]))
    simulate(ir, words, parameters(call, ir), min(call.groups, 4), resident=2)


@pytest.mark.parametrize("name", CASES)
def test_what_comes_too_early_is_a_race(name: str) -> None:
    build, module, changes, text = CASES[name]
    call, specs = build()
    copy = changed(module, *changes)
    kernel = next(k for k in vars(copy).values() if isinstance(k, Kernel))
    with pytest.raises(SimulationError, match=rf"kernel '{call.kernel.name}': .* {text}"):
        run(replace(call, kernel=kernel), specs)
