"""Float arithmetic is IEEE's, where drivers would rewrite it: infinities, NaN, rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella import In, Out, f32, lang
from centella.backends.webgpu import arithmetic
from centella.emit.wgsl import emit_wgsl
from centella.emit.wgsl.expressions import REWRITTEN
from centella.op.op import get
from centella.specs import Caps, Spec, make_spec
from centella.tensors import functional as f
from tests.plan.test_fuse import Keep, Make, both_ways
from tests.support.lang_common import empty, record, tensor
from tests.support.launched import op_form

Array = np.ndarray[Any, Any]
EDGES = np.array(
    [0.0, -0.0, 0.5, 1.0, -1.0, 0.1, 1e8, 1e20, 3e38, -3e38, np.inf, -np.inf, np.nan], np.float32
)


def formulas(x: Any, again: Any, floor: Any, sqrt: Any) -> list[Any]:
    """Of one number, read twice: none depends on how a product and a sum are rounded."""
    return [
        (x + 1.0) - x, x - (x + 1.0), x - x, x - again, (x + 1.0) - (again + 1.0), x * 0.0,
        x * -0.0, (x + 1e8) - 1e8, (x * 1e30) * 1e-30, x - floor(x), sqrt(x) * sqrt(x), x + 0.0,
        0.0 - x, (x + again) - x, -(x - again), (x * 0.5) * 0.5 - x,
    ]  # fmt: skip


COUNT = len(formulas(np.float32(1), np.float32(1), np.floor, np.sqrt))


@ct.kernel(workgroup=64)
def each_formula(x: In[f32], y: Out[f32]) -> None:
    """A thread a number: all formulas of it."""
    i = lang.global_id()
    with lang.if_(i < x.shape(0)):
        for j, value in enumerate(formulas(x[i], x[i], lang.floor, lang.sqrt)):
            y[i * COUNT + j] = value


@ct.kernel(workgroup=64)
def quotients(x: In[f32], y: Out[f32]) -> None:
    """x / x, 0 / x, x / 0."""
    i = lang.global_id()
    with lang.if_(i < x.shape(0)):
        for j, value in enumerate((x[i] / x[i], 0.0 / x[i], x[i] / 0.0)):
            y[i * 3 + j] = value


@ct.kernel(workgroup=64)
def nested_fma(x: In[f32], y: Out[f32], s: ct.f32) -> None:
    """x s + (1 - x s)."""
    i = lang.global_id()
    factor: Any = s
    with lang.if_(i < x.shape(0)):
        y[i] = lang.fma(x[i], factor, lang.fma(x[i], -factor, 1.0))


def equal(got: Array, expected: Array) -> None:
    """NaN for NaN, the same number else; the sign of 0 too."""
    np.testing.assert_array_equal(got, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(expected[number]))


def test_formulas_have_the_values_of_their_operations(device: ct.Device) -> None:
    x = ct.asarray(EDGES, device=device)
    y = ct.zeros((EDGES.size * COUNT,), device=device)
    each_formula(x, y, threads=EDGES.size)
    with np.errstate(all="ignore"):
        expected = np.stack(formulas(EDGES, EDGES, np.floor, np.sqrt), -1)
    equal(y.numpy().reshape(expected.shape), expected)


def test_zero_by_zero_is_nan(device: ct.Device) -> None:
    small = EDGES[np.isnan(EDGES) | np.isinf(EDGES) | (np.abs(EDGES) < 2.0**126)]
    y = ct.zeros((small.size * 3,), device=device)
    quotients(ct.asarray(small, device=device), y, threads=small.size)
    with np.errstate(all="ignore"):
        expected = np.stack([small / small, 0 / small, small / np.float32(0)], -1)
    np.testing.assert_allclose(y.numpy().reshape(expected.shape), expected, rtol=1e-6)


def test_no_two_fma_become_one(device: ct.Device) -> None:
    x = EDGES[~(np.abs(EDGES) >= 3e38) | ~np.isfinite(EDGES)]  # twice that is infinite: see `fma`
    y = ct.zeros(x.shape, device=device)
    nested_fma(ct.asarray(x, device=device), y, s=2.0, threads=x.size)
    with np.errstate(all="ignore"):
        expected = 2 * x + (1 - 2 * x)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-6)


# -- fused programs --------------------------------------------------------------------------------


def program(seed: int, make: Make, keep: Keep) -> list[ct.Tensor]:
    """Some thirty operations on edges; each may read what any before it made."""
    rng = np.random.default_rng(seed)
    have = [make(), make(), make()]
    for _ in range(30):
        x, y = (have[int(i)] for i in rng.integers(len(have), size=2))
        number = float(rng.choice([0.0, 1.0, -1.0, 0.5, 1e8, 1e30, 1e-30]))
        pick = int(rng.integers(11))
        if pick < 6:
            result = (x + y, x - y, x * y, x + number, x - number, x * number)[pick]
        elif pick < 9:
            result = (f.abs(x), -x, f.maximum(x, y))[pick - 6]
        else:
            result = (x / y, f.sqrt(f.abs(x)))[pick - 9]
        have.append(keep(result))
        have.pop(int(rng.integers(len(have) - 1)) if len(have) > 6 else 0)
    return have[-3:]


@pytest.mark.devices("cpu", "simulator", "webgpu", "webgpu-minimum", "cuda")
@pytest.mark.parametrize("seed", range(40))
def test_fused_programs_have_the_same_bits(device: ct.Device, seed: int) -> None:
    rng = np.random.default_rng(seed)
    given = [
        ct.asarray(np.concatenate([rng.permutation(EDGES), rng.normal(size=50)]).astype(np.float32),
                   device=device)
        for _ in range(3)
    ]  # fmt: skip
    ct.fetch(*given).result()
    (fused, few), (plain, many) = both_ways(lambda t, keep: program(seed, t, keep), given)
    assert few < many
    for a, b in zip(fused, plain, strict=True):
        number = ~np.isnan(b)
        np.testing.assert_array_equal(np.isnan(a), ~number)
        assert a[number].tobytes() == b[number].tobytes()


# -- the probe, and what it changes ----------------------------------------------------------------


def test_a_probe_sees_each_formula_rewritten() -> None:
    x, s = arithmetic.probes().T
    one = np.ones_like(x)
    with np.errstate(all="ignore"):
        rewritten = (
            one, -one, 0 * one, 0 * one, 0 * x + 0, one, x, x, x * (s * s), (s * s) * x,
            np.where(np.isinf(x), 0, x - np.floor(x)), np.abs(x),
        )  # fmt: skip
    exact = arithmetic.expected()
    assert arithmetic.right(exact)
    assert len(rewritten) == len(arithmetic.FORMULAS) == exact.shape[1]
    zero_for_all = arithmetic.FORMULAS.index("x * 0.0")
    for i, values in enumerate(rewritten):
        wrong = exact.copy()
        wrong[:, i] = 0 if i == zero_for_all else values
        assert not arithmetic.right(wrong), arithmetic.FORMULAS[i]
    flushed = np.where(np.abs(exact) < np.float32(2.0**-126), np.float32(0), exact)
    assert arithmetic.right(flushed)


def test_a_driver_that_keeps_to_it_has_the_plain_text() -> None:
    ir = record(each_formula.__wrapped__, {"x": tensor(EDGES), "y": empty((300,), f32)}, 64)
    plain, settled = emit_wgsl(ir), emit_wgsl(ir, settled=REWRITTEN)
    assert "wid.z" not in plain and "settled" not in plain and "apart" not in plain
    assert settled.count("settled(") > 15


@pytest.mark.devices("webgpu", "webgpu-minimum", "webgpu-hardware")
def test_a_probe_that_fails_keeps_the_plain_text(
    device: ct.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = device.backend.native
    assert arithmetic.rewrites(native) == device.caps.rewrites_arithmetic
    monkeypatch.setattr(arithmetic, "SOURCE", "no shader of {fields} and {lines}")
    assert not arithmetic.rewrites(native)


def test_kernels_without_formulas_of_users_keep_their_sums_alone() -> None:
    """Softmax, products and attention are exact enough as a driver rewrites the rest, and faster.

    Attention's error was 2.5 times as large where a driver had added in another order.
    """
    caps = Caps(target="wgsl")
    guarded = replace(caps, rewrites_arithmetic=True)

    def text(name: str, specs: tuple[Spec, ...], caps: Caps, **attrs: Any) -> str:
        op = get(name)
        outputs = tuple(
            make_spec(shape, kind, 16) for shape, kind in op.rule(specs, op.attrs(**attrs))
        )
        (call,) = op_form(op, specs, outputs, attrs).lower(caps).calls
        kinds = tuple(ref.spec.dtype for ref in call.tensors)
        unit = (True,) * len(kinds)
        return call.kernel.program(
            caps, kinds, unit, call.constants, call.workgroup, call.signature
        ).source

    x = make_spec((8, 64), f32, 16)
    plain, settled = (text("softmax", (x,), each).splitlines() for each in (caps, guarded))
    changed = [line for line in settled if "settled(" in line and "fn " not in line]
    assert changed and all(" + " in line for line in changed)
    assert len(settled) - len(plain) < 10  # the functions of the guard
    assert text("mul", (x, x), caps) != text("mul", (x, x), guarded)
