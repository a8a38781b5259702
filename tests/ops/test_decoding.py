"""Kernels of a decoder's step as CUDA has them, with shuffles, in the simulator and as PTX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from centella import lang
from centella.dtypes import DType, bool_, dtype_of, f32, i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.op import op
from centella.op.op import Form, named
from centella.ops import speech_beams, topk
from centella.ops.rows import Team, walk
from centella.ops.speech_host import NEVER
from centella.simulator.run import simulate
from centella.specs import Caps, make_spec
from tests.emit.test_lang_ptx import assemble_clean, execute, needs_ptxas
from tests.support.lang_common import Tensor
from tests.support.launched import laid_out, op_form, parameters, rounded, traced

Array = np.ndarray[Any, Any]
CUDA = Caps("ptx", max_storage_buffers=64, max_workgroup=1024, max_shared=227 << 10,
            subgroups=True, native_f16_pack=True, native_exp2=True, arch="sm_90a",
            family="nvidia")  # fmt: skip
TIMES = {"end": 5000, "zero": 6000, "no_timestamps": 5999, "latest": 6100}
EARLY = {"end": 1000, "zero": 2000, "no_timestamps": 1999, "latest": 2100}  # of few tokens
Given = list[tuple[Array, DType]]


def formed(name: str, given: Given, **attrs: Any) -> Form[Any]:
    """What an op is asked to do with these arrays."""
    inputs = tuple(make_spec(a.shape, d, 16) for a, d in given)
    declared = op.get(name)
    outputs = declared.rule(inputs, declared.attrs(**attrs))
    return op_form(declared, inputs, tuple(make_spec(s, d, 16) for s, d in outputs), attrs)


def simulated(
    form: Form[Any], given: Given, *, ptx: bool = False, caps: Caps = CUDA
) -> list[Array]:  # fmt: skip
    """The results of the launches for CUDA: States first, as the op has them.

    Args:
        ptx: interpret the PTX, too, which gives the same bits.
    """
    lowered = form.lower(caps)
    specs = [*form.inputs, *form.outputs, *lowered.temporaries]
    arrays: list[Array | None] = [a for a, _ in given]
    arrays += [None] * (len(specs) - len(arrays))
    words = [laid_out(a, s) for a, s in zip(arrays, specs, strict=True)]
    kernels = [traced(call) for call in lowered.calls]
    shuffled = caps.subgroups and form.inputs[0].dtype.is_float
    assert any(ir.uses_subgroups for ir in kernels) or not shuffled
    for call, ir in zip(lowered.calls, kernels, strict=True):
        bound, params = [words[r.index] for r in call.tensors], parameters(call, ir)
        again = [w.copy() for w in bound]
        simulate(ir, bound, params, call.groups, subgroup=32)
        if ptx:
            execute(ir, "sm_90a", again, params, call.groups)
            for word, same in zip(bound, again, strict=True):
                np.testing.assert_array_equal(word, same)
    mutated = form.op.mutates
    at = [*mutated, *range(len(given) + len(mutated), len(given) + len(form.outputs))]
    return [Tensor(words[i], specs[i].dtype, specs[i].shape, specs[i].strides, 0).numpy()
            for i in at]  # fmt: skip


def wanted(form: Form[Any], given: Given) -> list[Array]:
    """The same by the formula, in float64."""
    arrays = [rounded(a, d) if d.is_float else a.copy() for a, d in given]
    attrs = {n: v for n, v in named(form.attrs).items() if n != "variant"}
    with np.errstate(all="ignore"):  # as the CPU calls it
        result = form.op.reference(*arrays, **attrs)  # it has one
    return list(result) if isinstance(result, tuple) else [result]


def check(name: str, given: Given, near: float, **attrs: Any) -> None:
    """Compare all results."""
    form = formed(name, given, **attrs)
    pairs = zip(simulated(form, given), wanted(form, given), strict=True)
    for got, right in pairs:
        size = np.abs(right[np.isfinite(right)]).max(initial=0)
        np.testing.assert_allclose(got, right, rtol=near, atol=near * size)


def layer_norm(rows: int, k: int, n: int, dtype: DType, seed: int = 0) -> Given:
    """Operands of a product with a layer norm and an epilogue."""
    rng = np.random.default_rng(seed)
    shapes = (rows, k), (n, k), (k,), (k,), (n,), (rows, n)
    arrays = [rng.standard_normal(s) for s in shapes]
    arrays[0] = arrays[0] + 30
    arrays[1] /= k**0.5
    kinds = (dtype, dtype, f32, f32, f32, dtype)
    return list(zip(arrays, kinds, strict=True))


LAYER = {"extras": ("norm", "shift", "bias", "residual"), "gate": "", "eps": 1e-5, "alpha": 1.0,
         "dtype": "f32", "kind": "layer", "activation": "gelu"}  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("rows", "k"), [(1, 1280), (2, 384), (1, 531), (2, 67), (1, 9000)])
def test_a_layer_norm_before_a_product(rows: int, k: int, dtype: str) -> None:
    check("normed_linear", layer_norm(rows, k, 21, dtype_of(dtype)), 2e-5, **LAYER)


def step(heads: int, capacity: int, dim: int, dtype: DType, starts: list[int]) -> Given:
    """Operands of a step in a cache, whose content from the starts on is NaN."""
    rng, b = np.random.default_rng(dim), len(starts)
    caches = rng.standard_normal((2, b, heads, capacity, dim))
    for row, start in enumerate(starts):
        caches[:, row, :, start:] = np.nan
    rows = rng.standard_normal((3, b, heads, 1, dim))
    floats = [(a, dtype) for a in (*caches, *rows)]
    return [*floats, (np.array(starts, np.int32), i32)]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("capacity", "dim"), [(448, 64), (7, 24), (300, 128), (1024, 8), (256, 16)]
)
def test_a_step_in_a_short_cache(capacity: int, dim: int, dtype: str) -> None:
    """The last position that there is, none, the first, one in the middle."""
    kind, starts = dtype_of(dtype), [capacity - 1, capacity, 0, 3]
    near = max(4 * kind.epsilon, 1e-5)
    check("cache_attend", step(2, capacity, dim, kind, starts), near, scale=dim**-0.5)


def test_an_infinite_value_stays_in_its_column() -> None:
    """The last cached key, which stands for those behind it; its team has further keys."""
    given = step(1, 448, 16, f32, [300])
    given[1][0][0, 0, 299, 3] = np.inf
    form = formed("cache_attend", given, scale=0.25)
    got = simulated(form, given)[2].reshape(-1)
    assert got[3] == np.inf and np.isfinite(np.delete(got, 3)).all()


def turned(
    heads: int, kv: int, tokens: int, dim: int, dtype: DType, starts: list[int], *,
    capacity: int, blocks: bool = False,
) -> Given:  # fmt: skip
    """Operands of `rope_attend`, in caches whose content past the lengths is NaN."""
    rng, b = np.random.default_rng(dim), len(starts)
    caches = rng.standard_normal((2, b, kv, capacity, dim))
    for row, start in enumerate(starts):
        caches[:, row, :, start:] = np.nan
    at = np.array(starts, np.int32)
    if blocks:  # block 0 belongs to nobody
        each = caches.reshape(2, b, kv, -1, 64, dim).transpose(0, 2, 1, 3, 4, 5)
        pool = each.reshape(2, kv, -1, 64, dim)
        caches = np.concatenate([np.full_like(pool[:, :, :1], np.nan), pool], 2)
        numbers = 1 + np.arange(b * capacity // 64).reshape(b, -1)
        at = np.concatenate([at[:, None], numbers], 1).astype(np.int32)
    x = rng.standard_normal((b, heads + 2 * kv, tokens, dim))
    angles = rng.uniform(-3, 3, (capacity, dim // 2))
    tables = [(f(angles).astype(np.float32), f32) for f in (np.cos, np.sin)]
    return [*((a, dtype) for a in (*caches, x)), *tables, (at, i32),
            (rng.standard_normal((2, dim)), dtype)]  # fmt: skip


@pytest.mark.parametrize("variant", ["ring", "cluster", "split_mma"])
@pytest.mark.parametrize(
    ("tokens", "starts", "more"),
    [
        (1, [0, 130], {}),
        (2, [63, 318], {}),
        (1, [128, 191], {"blocks": True}),
        (4, [-2, -1, 62, -9], {"blocks": True}),
    ],
)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_rotation_and_cache_in_front_of_attention(
    variant: str, tokens: int, starts: list[int], more: dict[str, Any], dtype: str
) -> None:
    """At the borders of parts; several tokens in two of them, or before the first; a window."""
    kind = dtype_of(dtype)
    given = turned(4, 2, tokens, 64, kind, starts, capacity=320, **more)
    attrs = {"interleaved": False, "eps": 1e-6, "scale": 0.1, "variant": variant}
    check("rope_attend", given, 8 * kind.epsilon, **attrs, window=100 if tokens == 1 else None)


@pytest.mark.turns("dtype", "variant")
@pytest.mark.parametrize("variant", ["ring", "cluster", "split_mma"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [32, 8], ids=["whole", "partial"])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_every_rotation_of_a_step(
    variant: str, interleaved: bool, pairs: int, normed: bool, dtype: str
) -> None:
    """Positions past the tables give NaN; an infinite value stays, as does a column that passes."""
    kind = dtype_of(dtype)
    given = turned(4, 2, 1, 64, kind, [70, 0, 101], capacity=128)
    for n in (3, 4):
        given[n] = (given[n][0][:100, :pairs], f32)
    x = given[2][0]
    x[1, -1, 0, 5] = np.inf  # of a value
    if pairs == 8 and not normed:
        x[0, 0, 0, 63] = np.inf  # of a query
    attrs = {"interleaved": interleaved, "eps": 1e-6, "scale": 0.1, "variant": variant}
    check("rope_attend", given if normed else given[:-1], 10 * kind.epsilon, **attrs)


@pytest.mark.parametrize(
    ("variant", "dim", "dtype"),
    [("ring", 64, "f16"), ("cluster", 64, "f16"), ("split_mma", 64, "f16"), ("split", 64, "f32"),
     ("split", 20, "f32")],
)  # fmt: skip
def test_what_a_window_hides_is_not_met(variant: str, dim: int, dtype: str) -> None:
    """NaN in front of it, in the part that it begins in."""
    starts, results = [100, 130], list[Array]()
    caps = CUDA if dtype == "f16" else Caps("ir")
    attrs = {"interleaved": False, "eps": 1e-6, "scale": 0.1, "variant": variant, "window": 50}
    for hidden in (0.0, np.nan):
        given = turned(4, 2, 1, dim, dtype_of(dtype), starts, capacity=192)
        given[3:5] = [(table[:, : dim // 8 * 4], d) for table, d in given[3:5]]
        for row, start in enumerate(starts):
            for cache, _ in given[:2]:
                cache[row, :, : start - 49] = hidden
        results.append(simulated(formed("rope_attend", given, **attrs), given, caps=caps)[2])
    assert np.isfinite(results[0]).all()
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("variant", ["ring", "cluster", "split_mma"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_what_does_not_turn_is_as_it_was(variant: str, interleaved: bool) -> None:
    """Signs of zeros and infinities; with norms its own weight alone, whatever the others are."""
    starts, f16 = [5, 130], dtype_of("f16")
    given = turned(4, 2, 1, 64, f16, starts, capacity=192)
    x, norms = given[2][0], given[6][0]
    given[3:5] = [(table[:, :16], d) for table, d in given[3:5]]
    x[..., 32:48] = np.resize([-0.0, 0.0, np.inf, -np.inf], 16)
    attrs = {"interleaved": interleaved, "eps": 1e-6, "scale": 0.1, "variant": variant}
    given.pop()
    keys = simulated(formed("rope_attend", given, **attrs), given)[0]
    for row, start in enumerate(starts):
        got, brought = keys[row, :, start, 32:], rounded(x[row, 4:6, 0, 32:], f16)
        np.testing.assert_array_equal(got, brought)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(brought))
    x[..., 32:48], norms[:, :32] = 1.0, np.nan
    given.append((norms, f16))
    keys = simulated(formed("rope_attend", given, **attrs), given)[0]
    for row, start in enumerate(starts):
        assert np.isfinite(keys[row, :, start, 32:]).all()
        assert np.isnan(keys[row, :, start, :32]).all()


def windows(batch: int, vocab: int, zero: int = TIMES["zero"]) -> Given:
    """Operands of a step of transcripts, in each state of a text."""
    rng = np.random.default_rng(vocab)
    before = np.array([(0, 0), (1, 0), (1, 1), (0, 1)])
    row = np.arange(batch)
    notes = np.stack([row == 5, row, zero + row, *before[row % 4].T, 40 + row], 1)
    sums = np.stack([row, 0.5 + row % 2], 1).astype(np.float32)
    levels = rng.choice(3, vocab, p=[0.8, 0.1, 0.1])
    logits = 2 * rng.standard_normal((batch, vocab))
    pairs = (notes, i32), (sums, f32), (row[:, None], i32), (logits, f32), (levels, i32)
    return [(a.astype(np.float32 if d is f32 else np.int32), d) for a, d in pairs]


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("timed", [False, True])
def test_the_rules_of_transcripts(timed: bool, random: bool) -> None:
    check("speech_token", windows(6, 7501), 1e-5, **TIMES, timed=timed, random=random)


@pytest.mark.parametrize("timed", [False, True])
def test_the_texts_that_beams_may_become(timed: bool) -> None:
    few = beams(1, 2, 2150, EARLY["zero"])  # PTX is interpreted thread by thread
    form = formed("speech_beams", few, **EARLY, timed=timed, random=False)
    simulated(form, few, ptx=True)
    check("speech_beams", beams(2, 3, 7501), 1e-5, **TIMES, timed=timed, random=False)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("timed", [False, True])
def test_no_text_is_likely_by_logits_that_are_not_finite(timed: bool, value: float) -> None:
    """One of a token that may not come suffices: all that may come are NaN, as the host expects."""
    given = beams(2, 3, 7501)
    given[0][0][1, 0, 7], given[1][0][7] = value, 2
    form = formed("speech_beams", given, **TIMES, timed=timed, random=False)
    for results in (simulated(form, given), wanted(form, given)):
        best, which = results
        assert np.isfinite(best[0]).all()
        assert np.isnan(best[1]).all()
        assert set(which[1] // 7501) == {0}


def _whole(
    *, timed: bool, team: Team, logits: Argument, levels: Argument, notes: Argument,
    running: Argument, figures: Argument, wholes: Argument, y: Argument,
) -> None:  # fmt: skip
    """Scores of all texts, of which `speech_beams` chooses."""
    columns, beam = lang.parameter("columns", u32), lang.parameter("beam", u32)
    row = lang.group_id()
    score = speech_beams._scored(timed, team, row, notes, figures, wholes)
    for token in walk(columns, 1):
        text = score(token, logits[row, token], levels[token]) + running[row // beam, row % beam]
        y[row // beam, row % beam * columns + token] = text


def all_texts(form: Form[Any], given: Given, caps: Caps) -> Array:
    """What the launches before the choice find, of all tokens: f32 [windows, beam * vocab]."""
    lowered = form.lower(caps)
    survey, choose = lowered.calls[:2]
    w, b, v = form.inputs[0].shape
    y = make_spec((w, b * v), f32, 4)
    specs = [*form.inputs, *form.outputs, *lowered.temporaries, y]
    arrays = [a for a, _ in given] + [None] * (len(specs) - len(given))
    words = [laid_out(a, s) for a, s in zip(arrays, specs, strict=True)]
    reads, constants = choose.tensors[:6], choose.constants[:2]
    refs = (*reads, Ref(len(specs) - 1, y))
    names = ("logits", "levels", "notes", "running", "figures", "wholes")
    ranks = {n: len(r.spec.shape) for n, r in zip(names, reads, strict=True)}
    kernel = Kernel(_whole, workgroup=speech_beams.WORKGROUP, name="texts")
    whole = Call(kernel, refs, choose.scalars, constants, w * b,
                 signature=signature(ranks, {"y": 2}))  # fmt: skip
    for call in (survey, whole):
        ir = traced(call)
        bound, lanes = [words[r.index] for r in call.tensors], 32 if caps.subgroups else 1
        simulate(ir, bound, parameters(call, ir), call.groups, subgroup=lanes)
    return Tensor(words[-1], f32, y.shape, y.strides, 0).numpy()


@pytest.mark.parametrize("caps", [CUDA, Caps("ir")], ids=["cuda", "minimum"])
@pytest.mark.parametrize("values", ["any", "ties", "nan", "none"])
@pytest.mark.parametrize(("beam", "vocab"), [(1, 2), (5, 4), (3, 7501), (8, 2049), (16, 6145)])
def test_the_texts_that_are_chosen_are_the_best_of_all(
    beam: int, vocab: int, values: str, caps: Caps
) -> None:
    """As `topk` chooses among all scores, to the bit; with beams that are alike, of tied logits."""
    given = beams(2, beam, vocab)
    logits, running = given[0][0], given[3][0]
    if values == "ties":
        logits[:], running[:] = np.round(logits[:, :1]), 0
        given[2][0][:] = given[2][0][:, :1]
    elif values == "nan":  # of one beam, and of a window whose beam before it has no more texts
        logits[0, -1, vocab // 2], running[0, 0] = np.nan, -np.inf
        logits[1, 0, vocab - 1] = -np.inf
    elif values == "none":
        logits[0], given[1][0][: vocab // 2] = -np.inf, 2
        running[1] = NEVER
    form = formed("speech_beams", given, **TIMES, timed=beam != 5, random=False)
    texts = all_texts(form, given, caps)
    best, which = simulated(form, given, caps=caps)
    right, codes = topk.reference(texts, 2 * beam)
    np.testing.assert_array_equal(which, codes)
    np.testing.assert_array_equal(best, right)


@pytest.mark.parametrize("beam", range(1, 9))
def test_the_best_texts_are_found_in_three_launches(beam: int) -> None:
    form = formed("speech_beams", beams(1, beam, 51866), **TIMES, timed=True, random=False)
    for caps in (CUDA, Caps("ir")):
        names = [call.kernel.name for call in form.lower(caps).calls]
        assert names == ["speech_survey", "speech_beams", "topk"]


def beams(batch: int, beam: int, vocab: int, zero: int = TIMES["zero"]) -> Given:
    """Operands of a step of beams."""
    notes, _, _, logits, levels = windows(batch * beam, vocab, zero)
    running = -np.random.default_rng(beam).random((batch, beam)).astype(np.float32)
    by_window = [(a.reshape(batch, beam, -1), d) for a, d in (logits, notes)]
    return [by_window[0], levels, by_window[1], (running, f32)]


def moved(batch: int, beam: int, slots: int, vocab: int) -> Given:
    """Operands of beams that go on."""
    rng, rows = np.random.default_rng(slots), batch * beam
    seen, notes = rng.random((rows, slots)) < 0.5, windows(rows, 7501)[0]
    at = (rng.integers(0, slots, (batch, 2)).astype(np.int32), i32)
    went = [
        (np.zeros(rows, t), d) for t, d in ((np.int32, i32), (np.int32, i32), (np.float32, f32))
    ]
    best = (rng.standard_normal((batch, 2 * beam)).astype(np.float32), f32)
    codes = (rng.integers(0, beam * vocab, (batch, 2 * beam)).astype(np.int32), i32)
    return [(seen, bool_), notes, at, *went, best, codes]


def test_ptx_equals_the_simulator() -> None:
    f16 = dtype_of("f16")
    given = step(1, 40, 16, f16, [30])
    simulated(formed("cache_attend", given, scale=0.25), given, ptx=True)
    given = layer_norm(2, 67, 5, f16)
    simulated(formed("normed_linear", given, **LAYER), given, ptx=True)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("random", [False, True])
def test_no_token_is_chosen_by_logits_that_are_not_finite(random: bool, timed: bool) -> None:
    """Not one that is forbidden either, however likely; a row that has ended stays so."""
    allowed = next(i for i, level in enumerate(windows(6, 7501)[4][0]) if i > 5000 and not level)
    for fill, own, chosen in (
        (-np.inf, -np.inf, -1), (-np.inf, 2.0, allowed), (0.0, np.nan, -1), (0.0, np.inf, -1),
    ):  # fmt: skip
        given = windows(6, 7501)
        logits, levels = given[3][0], given[4][0]
        given[0][0][:, 4] = 1  # no time is due
        logits[:] = fill
        logits[:, allowed] = own
        logits[:, 7], levels[7] = 50.0, 2
        form = formed("speech_token", given, **TIMES, timed=timed, random=random)
        for results in (simulated(form, given), wanted(form, given)):
            rows = results[3].tolist()
            assert (set(rows[1:5]), rows[5]) == ({chosen}, TIMES["end"])
            assert np.isnan(results[1][1:5, 0]).all() == (chosen == -1)


@pytest.mark.parametrize(("beam", "slots"), [(3, 70), (5, 2240)])
def test_beams_that_go_on_in_one_launch(beam: int, slots: int) -> None:
    """Of a group as large as CUDA has them; States to the bit."""
    given = moved(2, beam, slots, 7501)
    attrs = {"beam": beam, "vocab": 7501, "end": TIMES["end"], "zero": TIMES["zero"]}
    form = formed("speech_move", given, **attrs)
    results = simulated(form, given, ptx=True)
    for got, right in zip(results, wanted(form, given), strict=True):
        np.testing.assert_array_equal(got, right)


@needs_ptxas
def test_ptxas_accepts_whispers_step(tmp_path: Path) -> None:
    """The kernels of large-v3's shapes; nothing is spilled."""
    f16 = dtype_of("f16")
    rows = {
        "normed_linear": [formed("normed_linear", layer_norm(m, 1280, n, f16), **LAYER)
                          for m in (1, 2) for n in (1280, 3840)],
        "cache_attend": [formed("cache_attend", step(20, 448, 64, f16, [3]), scale=0.125)],
        "speech_token": [formed("speech_token", windows(1, 51866), **TIMES, timed=True, random=r)
                         for r in (False, True)],
        "speech_beams": [formed("speech_beams", beams(1, 5, 51866), **TIMES, timed=t, random=False)
                         for t in (False, True)],
        "speech_move": [formed("speech_move", moved(1, b, 448 * b, 51866), beam=b, vocab=51866,
                               end=50257, zero=50365) for b in (1, 5, 16)],
    }  # fmt: skip
    for form in (form for forms in rows.values() for form in forms):
        for call in form.lower(CUDA).calls:
            assemble_clean(traced(call), "sm_90a", tmp_path)
