"""`rope_cache_write` outside a device: norms, and threads that have several heads of a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, bf16, f16, f32, i32
from centella.emit.program import Call
from centella.op import op
from centella.op.op import Form
from centella.ops import rope_heads
from centella.ops.rope_cache import ROPE_CACHE, RopeCacheAttrs
from centella.ops.rope_heads import FULL, Share
from centella.simulator.run import simulate
from centella.specs import Caps, make_spec
from centella.tensors.tensor import apply_all
from tests.emit.test_lang_ptx import assemble as ptxas
from tests.emit.test_lang_ptx import assemble_clean, execute, needs_ptxas, resources
from tests.support.attention import CAPS
from tests.support.lang_common import Tensor
from tests.support.launched import laid_out, op_form, parameters, rounded, traced


@pytest.mark.parametrize(("dim", "rotary"), [(12, 12), (20, 16), (21, 16), (24, 24)])
@pytest.mark.parametrize("norm", [f32, f16], ids=str)
@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_weights_of_the_norm_end_with_the_head(
    dim: int, rotary: int, norm: DType, dtype: DType
) -> None:
    """Rows of x are padded to whole chunks; those of the weights may end before."""
    cache, x = make_spec((1, 1, 4, dim), dtype, 16), make_spec((1, 4, 3, dim), dtype, 16)
    table = make_spec((8, rotary // 2), f32, 16)
    inputs = (
        cache,
        cache,
        x,
        table,
        table,
        make_spec((1,), i32, 16),
        make_spec((2, dim), norm, 16),
    )
    outputs = (cache, cache, make_spec((1, 2, 3, dim), dtype, 16))
    attrs = {"interleaved": True, "eps": 1e-5}
    (call,) = op_form(op.get("rope_cache_write"), inputs, outputs, attrs).lower(CAPS).calls
    ir, rng = traced(call), np.random.default_rng(dim)
    values = rng.standard_normal(x.shape)
    given = [np.zeros(cache.shape), np.zeros(cache.shape), values, np.ones(table.shape),
             np.zeros(table.shape), np.zeros(1), np.full((2, dim), 2.0)]  # fmt: skip
    specs, arrays = (*inputs, *outputs), dict(enumerate(given))
    words = [laid_out(arrays.get(r.index), specs[r.index]) for r in call.tensors]
    simulate(ir, words, parameters(call, ir), call.groups)
    (q,) = (n for n, r in enumerate(call.tensors) if r.index == len(specs) - 1)
    got = Tensor(words[q], dtype, specs[-1].shape, specs[-1].strides).numpy()
    heads = rounded(values, dtype)[:, :2]
    wanted = 2 * heads / np.sqrt(np.mean(heads * heads, axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(got, wanted, rtol=2 * dtype.epsilon)


Array = np.ndarray[Any, Any]
BLOCKS = [[6, 3, 1, 4], [2, 2, 5, 0]]  # starts, then blocks: some tokens have none


def form(
    heads: int, kv_heads: int, dim: int, dtype: DType, *, rotary: int = 0, norm: DType | None = f32,
    tokens: int = 5, batch: int = 1, interleaved: bool = False, blocks: bool = False,
    table: int = 16, capacity: int = 9,
) -> Form[RopeCacheAttrs]:  # fmt: skip
    """The op, of x as a product leaves it: the heads of a token beside each other."""
    count = heads + 2 * kv_heads
    x = make_spec((batch, count, tokens, dim), dtype, 16)
    x = replace(x, strides=(tokens * count * dim, dim, count * dim, 1))
    cache = make_spec((kv_heads, 6, 4, dim) if blocks else (batch, kv_heads, capacity, dim), dtype,
                      16)  # fmt: skip
    angles = make_spec((table, (rotary or dim) // 2), f32, 16)
    starts = make_spec((batch, 4) if blocks else (batch,), i32, 16)
    norms = () if norm is None else (make_spec((2, dim), norm, 16),)
    inputs = (cache, cache, x, angles, angles, starts, *norms)
    y = make_spec((batch, heads, tokens, dim), dtype, 16)
    return op_form(ROPE_CACHE, inputs, (cache, cache, y), {"interleaved": interleaved, "eps": 1e-3})


def launched(asked: Form[RopeCacheAttrs], caps: Caps = CAPS) -> tuple[Call, Share | None]:
    """The launch, and who has which heads."""
    (call,) = asked.lower(caps).calls
    share = dict(call.constants).get("share")
    assert share is None or isinstance(share, Share)
    return call, share


def operands(asked: Form[RopeCacheAttrs], starts: Any) -> list[Array]:
    """Values of all operands; results are as long as they are not written."""
    rng = np.random.default_rng(5)
    given: list[Array] = [rng.standard_normal(s.shape) for s in asked.inputs]
    given[5] = np.asarray(starts, np.int32)
    return given


def words_of(asked: Form[RopeCacheAttrs], call: Call, given: list[Array]) -> list[Array]:
    """Memory of a launch: what pads a row, and q, is NaN."""
    specs = (*asked.inputs, *asked.outputs)
    return [laid_out(given[r.index] if r.index < len(given) else None, specs[r.index])
            for r in call.tensors]  # fmt: skip


def check(asked: Form[RopeCacheAttrs], starts: Any, each: int | None) -> None:
    """In the simulator as the formula has it; each element of the caches that is not written stays.

    Args:
        each: heads that a thread is to have; None: a thread has one chunk or word.
    """
    call, share = launched(asked)
    assert (share and share.each) == each
    given, ir = operands(asked, starts), traced(call)
    words = words_of(asked, call, given)
    simulate(ir, words, parameters(call, ir), call.groups)
    exact = [rounded(v, s.dtype) if s.dtype.is_float else v
             for v, s in zip(given, asked.inputs, strict=True)]  # fmt: skip
    assert ROPE_CACHE.reference is not None
    before = [v.copy() for v in exact[:2]]
    attrs = {"interleaved": asked.attrs.interleaved, "eps": asked.attrs.eps}
    wanted = ROPE_CACHE.reference(*exact, **attrs)
    specs = (*asked.inputs, *asked.outputs)
    places = {0: wanted[0], 1: wanted[1], len(asked.inputs) + 2: wanted[2]}
    for ref, held in zip(call.tensors, words, strict=True):
        if ref.index not in places:
            continue
        spec = specs[ref.index]
        got = Tensor(held, spec.dtype, spec.shape, spec.strides).numpy()
        bound = max(spec.dtype.epsilon, 2e-6)
        np.testing.assert_allclose(got, places[ref.index], rtol=bound, atol=4 * bound)
        if ref.index < 2:
            stays = places[ref.index] == before[ref.index]
            assert stays.any()
            np.testing.assert_array_equal(got[stays], before[ref.index][stays])


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens are enough for threads to have several heads."""
    monkeypatch.setattr(rope_heads, "FULL", 1)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("norm", [None, f32, f16], ids=str)
@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "each"),
    [(8, 4, 4), (12, 4, 4), (6, 2, 2), (5, 1, 1), (7, 3, 1), (9, 6, 1), (16, 16, 4)],
)
def test_heads_of_a_thread(
    heads: int, kv_heads: int, each: int, dtype: DType, norm: DType | None
) -> None:
    """All are of one kind: their number divides both counts; two sequences, one near its end."""
    asked = form(heads, kv_heads, 64, dtype, norm=norm, batch=2, tokens=3)
    check(asked, [1, 7], each)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("norm", [None, bf16], ids=str)
@pytest.mark.parametrize(
    ("dim", "rotary", "interleaved", "each"),
    [(64, 32, False, 4), (64, 48, False, 4), (64, 16, False, 4), (64, 64, True, 4),
     (64, 20, True, 4), (128, 96, False, 4), (32, 32, False, 2), (16, 16, False, 1),
     (16, 6, True, 1), (256, 256, False, 4)],
)  # fmt: skip
def test_columns_that_turn(
    dim: int, rotary: int, interleaved: bool, each: int, norm: DType | None
) -> None:
    """Pairs as neighbours or half apart, and columns that pass."""
    check(form(8, 4, dim, bf16, rotary=rotary, interleaved=interleaved, norm=norm), [2], each)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(
    ("dim", "norm", "each"),
    [(24, f32, None), (24, None, None), (80, None, 4), (80, f32, None), (96, None, 4),
     (48, f32, None), (8, f32, None), (12, None, None)],
)  # fmt: skip
def test_heads_that_are_no_pairs_of_chunks(dim: int, norm: DType | None, each: int | None) -> None:
    """Or whose threads do not shuffle: a thread has a chunk or a word."""
    check(form(8, 4, dim, f16, norm=norm), [2], each)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("norm", [None, f32], ids=str)
def test_through_a_table_of_blocks(norm: DType | None) -> None:
    """What is past the capacity, or has no block, is not written."""
    check(form(8, 4, 64, bf16, norm=norm, blocks=True, batch=2, tokens=7), BLOCKS, 4)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("norm", [None, f32], ids=str)
@pytest.mark.parametrize("rotary", [64, 32])
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_past_the_tables(norm: DType | None, rotary: int, interleaved: bool) -> None:
    """Are NaN where columns turn; all of a sequence, and some of others."""
    check(form(8, 4, 64, f16, norm=norm, batch=3, table=5, rotary=rotary, interleaved=interleaved),
          [7, 2, 4], 4)  # fmt: skip


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_several_heads_are_the_same_as_one(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, and to what the PTX computes."""
    results = []
    for full, each in ((1, 4), (FULL, 1)):
        monkeypatch.setattr(rope_heads, "FULL", full)
        asked = form(8, 4, 64, dtype)
        call, share = launched(asked)
        assert share is not None and share.each == each
        ir, words = traced(call), words_of(asked, call, operands(asked, [1]))
        again = [w.copy() for w in words]
        simulate(ir, words, parameters(call, ir), call.groups)
        execute(ir, "sm_80", again, parameters(call, ir), call.groups)
        for got, wanted in zip(again, words, strict=True):
            np.testing.assert_array_equal(got, wanted)
        results.append(words)
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_few_tokens_leave_threads_enough() -> None:
    """A step has a head a thread; a prompt several; no multiple of 2, and WebGPU's norms, one."""

    def chosen(tokens: int, heads: int = 32, kv: int = 8, **more: Any) -> int | None:
        caps = more.pop("caps", CAPS)
        _, share = launched(form(heads, kv, 128, bf16, tokens=tokens, capacity=4096, **more), caps)
        return share.each if share else None

    assert [chosen(n) for n in (1, 64, 171, 340, 342, 512, 2048)] == [1, 1, 2, 2, 4, 4, 4]
    assert [chosen(2048, *heads) for heads in ((14, 2), (9, 3), (8, 1))] == [2, 1, 1]
    few = Caps("wgsl", max_storage_buffers=8)
    assert (chosen(2048, caps=few), chosen(2048, caps=few, norm=None)) == (None, 4)


@needs_ptxas
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("norm", [None, bf16, f32], ids=str)
def test_chunks_stay_in_registers(norm: DType | None, arch: str, tmp_path: Path) -> None:
    """Of four heads 128 bytes, loaded once; four groups of 128 threads have a multiprocessor."""
    weights = {None: 0, bf16: 2, f32: 4}[norm]
    forms = (
        form(32, 8, 128, bf16, tokens=512, capacity=600, norm=norm),
        form(32, 8, 128, bf16, tokens=512, capacity=600, norm=norm, rotary=64, batch=2),
        form(32, 8, 128, bf16, tokens=512, capacity=600, norm=norm, interleaved=True),
        form(32, 8, 128, f16, tokens=512, norm=norm, interleaved=True, rotary=64, capacity=600),
    )
    for asked in forms:
        call, share = launched(asked)
        assert share is not None and share.each == 4
        text = assemble_clean(traced(call), arch, tmp_path)
        report, _ = ptxas(text, arch, tmp_path)
        assert resources(report)[0] <= 128, report
        tables = 0 if asked.attrs.interleaved else 4  # by chunks
        assert text.count("ld.global.nc.v4") == 8 + weights + tables


@pytest.mark.usefixtures("many")
@pytest.mark.devices("simulator", "webgpu", "webgpu-minimum", "cuda", "webgpu-hardware")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_on_a_device(device: ct.Device, norm: bool, interleaved: bool) -> None:
    """Whose memory is poisoned: some columns pass, one sequence ends past capacity and tables."""
    rng = np.random.default_rng(6)
    state, x = rng.standard_normal((2, 2, 4, 6, 32)), rng.standard_normal((2, 3, 16, 32))
    tables, weights = rng.standard_normal((2, 7, 8)), rng.standard_normal((2, 32))

    def on(value: Array, dtype: str = "f32") -> ct.Tensor:
        return ct.asarray(np.asarray(value), dtype=dtype, device=device)

    starts, norms = np.array([1, 5]), (weights,) if norm else ()
    caches = [ct.State(on(values)) for values in state]
    given = (*(c.value for c in caches), on(x).permute(0, 2, 1, 3), *(on(t) for t in tables),
             on(starts, "i32"), *(on(n) for n in norms))  # fmt: skip
    attrs = {"interleaved": interleaved, "eps": 1e-3}
    *_, q = apply_all(ROPE_CACHE, given, attrs)
    assert ROPE_CACHE.reference is not None
    wanted = ROPE_CACHE.reference(
        *state.copy(), x.transpose(0, 2, 1, 3), *tables, starts, *norms, **attrs
    )
    for got, exact in zip((*(c.value for c in caches), q), wanted, strict=True):
        np.testing.assert_allclose(got.numpy(), exact, rtol=1e-5, atol=1e-5)
