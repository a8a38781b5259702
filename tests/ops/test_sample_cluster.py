"""`sample` with a cluster a sequence: as with one group a sequence, and as the NumPy formula."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import f32, i32
from centella.emit.program import Call
from centella.errors import LimitError, SimulationError
from centella.lang.ptx.clusters import MOST_GROUPS
from centella.op.op import get
from centella.ops import sample, sample_cluster
from centella.simulator.run import simulate
from centella.specs import Caps, make_spec
from centella.tensors.tensor import apply_all
from tests.emit.test_lang_ptx import assemble_clean, needs_ptxas
from tests.ops.test_sample import MORE, SETTINGS, row_of
from tests.support.attention import CAPS
from tests.support.lang_common import ORDERS
from tests.support.launched import laid_out, op_form, parameters, traced
from tests.support.mutations import mistakes

Array = np.ndarray[Any, Any]
SIMULATOR = Caps("ir", max_shared=227 << 10)
EVERY = np.stack([row_of(**changes) for changes in SETTINGS.values()])
FURTHER = np.stack([row_of(**changes) for changes in MORE])


class Launched:
    """A launch of each variant on one request."""

    def __init__(self, arrays: list[Array]) -> None:
        self.arrays = arrays  # counts, steps, logits, settings, seeds, slots

    def call(self, variant: str | None, caps: Caps) -> Call:
        return launched([(a.shape, a.dtype == np.float32) for a in self.arrays], variant, caps)

    def run(self, variant: str, caps: Caps, **options: Any) -> list[Array]:
        """Counts, steps and tokens after a checked run."""
        call = self.call(variant, caps)
        ir, memory = traced(call), self.memory(call)
        simulate(ir, list(memory.values()), parameters(call, ir), call.groups, **options)
        rows, slots = len(self.arrays[2]), self.arrays[0].shape
        counts = np.ndarray(slots, np.int32, memory[0].data, 0, self._strides(call))
        return [counts, memory[1].view(np.int32)[: slots[0]],
                memory[len(self.arrays) + 2].view(np.int32)[:rows]]  # fmt: skip

    def memory(self, call: Call) -> dict[int, Array]:
        """Words of what a launch sees, by the number of the operand."""
        arrays = dict(enumerate(self.arrays))
        return {r.index: laid_out(arrays.get(r.index), r.spec) for r in call.tensors}

    def _strides(self, call: Call) -> tuple[int, ...]:
        (counts,) = (r.spec for r in call.tensors if r.index == 0)
        return tuple(4 * s for s in counts.strides)

    def check(self, caps: Caps = SIMULATOR, **options: Any) -> list[Array]:
        """Both variants and the formula give the same words; the tokens."""
        counts, steps, *given = (a.copy() for a in self.arrays)
        wanted = list(sample.reference(counts, steps, *given))
        for variant in ("group", "cluster_rows"):
            for got, right in zip(self.run(variant, caps, **options), wanted, strict=True):
                np.testing.assert_array_equal(got, right, err_msg=variant)
        return wanted


def launched(
    given: list[tuple[tuple[int, ...], bool]], variant: str | None, caps: Caps, align: int = 4
) -> Call:
    specs = tuple(make_spec(shape, f32 if real else i32, align) for shape, real in given)
    y = make_spec(specs[2].shape[:1], i32, 4)
    outs = (specs[0], specs[1], y)
    *_, call = op_form(sample.SAMPLE, specs, outs, {"variant": variant}).lower(caps).calls
    return call


def request(logits: Array, settings: Array, slots: Array | None = None) -> Launched:
    """Each row with settings of its own; tokens seen, and of the prompt."""
    random, (rows, columns) = np.random.default_rng(logits.size), logits.shape
    several = rows if slots is None else len(settings)
    counts = random.integers(0, 3, (several, columns)).astype(np.int32)
    counts[:, ::7] |= np.int32(-(1 << 31))
    steps, seeds = (random.integers(0, 1 << 20, several).astype(np.int32) for _ in range(2))
    arrays = [counts, steps, logits.astype(np.float32), settings[:several], seeds]
    return Launched(arrays if slots is None else [*arrays, slots])


def normal(rows: int, columns: int, width: float = 3.0) -> Array:
    return np.random.default_rng(columns).standard_normal((rows, columns)) * width


@pytest.mark.turns("third")
@pytest.mark.parametrize("third", range(3))
@pytest.mark.parametrize("settings", [EVERY, FURTHER], ids=["every", "more"])
@pytest.mark.parametrize(
    "columns",
    [5, 1003, 16_385, *(pytest.param(n, marks=pytest.mark.sweep) for n in (1, 8192, 32_003))],
)
def test_all_settings(columns: int, settings: Array, third: int) -> None:
    some = settings[third::3]
    request(normal(len(some), columns), some).check()


def test_any_gpu_with_clusters_runs_one() -> None:
    assert sample_cluster.GROUPS == MOST_GROUPS


@pytest.mark.parametrize(
    "caps",
    [pytest.param(SIMULATOR, id="256 threads", marks=pytest.mark.sweep),
     pytest.param(CAPS, id="1024 threads")],
)  # fmt: skip
def test_a_whole_vocabulary(caps: Caps) -> None:
    settings = EVERY[[list(SETTINGS).index("all"), list(SETTINGS).index("plain")]]
    request(normal(2, 151_936, 2.0), settings).check(caps)


def test_whole_chunks_past_the_end() -> None:
    """One row is read in chunks, whatever its length; the rest of its last chunk is NaN here."""
    for columns in (3, 8193, 9001):
        asked = request(normal(1, columns), EVERY[-1:])
        assert dict(asked.call("cluster_rows", SIMULATOR).constants)["chunk"]
        asked.check()


@pytest.mark.parametrize(
    "turn", [0, *(pytest.param(n, marks=pytest.mark.sweep) for n in (1, 2, 3))]
)
def test_ties_infinities_and_nan(turn: int) -> None:
    """Where a row has equal logits they are in chunks of several groups."""
    columns, random = 9001, np.random.default_rng(3)
    rows = np.zeros((8, columns))
    rows[0] = random.integers(0, 2, columns)
    rows[1, 5000:] = -np.inf
    rows[2] = -np.inf
    rows[3, [2500, 8000]] = np.inf
    rows[4, 8999] = np.nan
    rows[5] = random.integers(-3, 3, columns) * 0.25
    rows[6] = random.standard_normal(columns) * 800
    rows[7] = -np.abs(random.standard_normal(columns)) * 1e-6
    names = ("plain", "greedy", "top_p", "all")  # a row has another one each turn
    each = [SETTINGS[names[(row + turn) % 4]] for row in range(8)]
    settings = np.stack([row_of(**{**of_row, "repetition": 1.0}) for of_row in each])
    tokens = request(rows, settings).check()[2]
    assert tokens[4] == -1 and (np.delete(tokens, 4) >= 0).all()
    assert tokens[3] in (2500, 8000)
    assert request(rows[5:6], row_of(temperature=0.0)[None]).check()[2][0] == rows[5].argmax()


def test_slots() -> None:
    slots = np.array([4, 0, 9], np.int32)
    request(normal(3, 4099), EVERY, slots).check()


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_gives_the_same(order: str) -> None:
    for columns in (900, 8200):
        request(normal(1, columns), EVERY[-1:]).check(order=order)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.sweep) for n in (1, 2, 3))]
)
def test_every_meeting_is_needed(part: int) -> None:
    """A kernel without one of its barriers or waits is reported."""
    asked = request(normal(1, 40), EVERY[-1:])
    call = asked.call("cluster_rows", SIMULATOR)
    ir, found = traced(call), 0
    missing = [mistake for mistake in mistakes(ir) if mistake.label.startswith("no ")]
    for mistake in missing[part::4]:
        memory = list(asked.memory(call).values())
        with pytest.raises(SimulationError):
            simulate(mistake.of(ir), memory, parameters(call, ir), call.groups)
            pytest.fail(mistake.label)
        found += 1
    assert found > 5 and len(missing) > 20


@cache
def shaped(rows: int, columns: int, variant: str | None = None, **changes: Any) -> Call:
    given = [((rows, columns), False), ((rows,), False), ((rows, columns), True),
             ((rows, 7), True), ((rows,), False)]  # fmt: skip
    return launched(given, variant, replace(CAPS, **changes), 16)


@pytest.mark.parametrize(
    ("rows", "columns", "changes", "name"),
    [(1, 151_936, {}, "sample_cluster"), (16, 16_384, {}, "sample_cluster"),
     (17, 151_936, {}, "sample_slices"), (1, 16_383, {}, "sample"),
     (1, 262_144, {}, "sample_cluster"), (1, 151_936, {"arch": "sm_80"}, "sample_slices"),
     (1, 151_936, {"max_shared": 99 << 10}, "sample_slices"), (1, 1_000_000, {}, "sample_slices"),
     (1, 1 << 22, {}, "sample")],
)  # fmt: skip
def test_few_long_rows_have_clusters(
    rows: int, columns: int, changes: dict[str, Any], name: str
) -> None:
    call = shaped(rows, columns, **changes)
    assert call.kernel.name == name and call.workgroup == 1024
    assert call.groups == rows * traced(call).cluster
    assert traced(call).shared_bytes <= CAPS.max_shared


def test_a_thread_for_each_bin() -> None:
    asked = request(normal(1, 100), EVERY[:1])
    with pytest.raises(LimitError, match=r"sample of \[1, 100\]: no variant fits"):
        asked.call(None, Caps("ir", max_workgroup=128))


@pytest.mark.parametrize("caps", [Caps("ir"), Caps("wgsl", max_shared=227 << 10)], ids=str)
def test_no_room_or_no_clusters(caps: Caps) -> None:
    asked = request(normal(1, 100), EVERY[:1])
    with pytest.raises(LimitError, match="variant 'cluster_rows' does not fit"):
        asked.call("cluster_rows", caps)


@needs_ptxas
@pytest.mark.parametrize("columns", [16_385, 151_936, 262_144])
def test_it_assembles(columns: int, tmp_path: Path) -> None:
    """Each histogram is sent once, in words of four; a sequence has one program."""
    text = assemble_clean(traced(shaped(1, columns)), "sm_90a", tmp_path)
    assert ".reqnctapercluster 8" in text.replace(", 1, 1", "")
    assert text.count("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4") == 2
    before, wait, behind = text.partition("griddepcontrol.wait;")
    assert wait and "griddepcontrol.wait" not in behind
    assert "ld.global" not in before and "ld.global" in behind


@pytest.mark.devices("cuda")
def test_on_a_device(device: ct.Device) -> None:
    columns = 151_936
    for settings in (*EVERY, *FURTHER):
        counts, steps, logits, rows, seeds = request(normal(1, columns), settings[None]).arrays
        answers = []
        for variant in sample.SAMPLE.variants:
            states = [ct.State(a, device=device) for a in (counts, steps)]
            given = (ct.asarray(a, device=device) for a in (logits, rows, seeds))
            operands = (*(s.value for s in states), *given)
            y = apply_all(get("sample"), operands, {"variant": variant})[2]
            answers.append([y.numpy(), *(s.numpy() for s in states)])
        for one, *others in zip(*answers, strict=True):
            for other in others:
                np.testing.assert_array_equal(one, other)
