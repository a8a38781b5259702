"""Decoding on tensor cores: the simulator, its PTX as text, through `ptxas` and on a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, bf16, dtype_of, f16, narrow, widen
from centella.emit.program import Call, parameter_words
from centella.emit.ptx import emit_ptx
from centella.errors import LimitError
from centella.lang import KernelIR
from centella.op import op
from centella.ops.attention.split_mma import SplitTile
from centella.simulator.run import simulate
from centella.specs import Caps, Spec, make_spec
from tests.emit.test_lang_ptx import assemble, execute, needs_ptxas, resources
from tests.ops.test_attention_mma import stored
from tests.support.lang_common import ORDERS

Array = np.ndarray[Any, Any]
CAPS = Caps("ptx", max_storage_buffers=64, max_workgroup=1024, max_shared=227 << 10,
            subgroups=True, arch="sm_90a")  # fmt: skip
TILE = SplitTile()
BOUND = {f16: 5e-4, bf16: 4e-3}  # relative Frobenius error


class Step(NamedTuple):
    """The two launches of a decoding step, and what they read."""

    calls: tuple[Call, ...]
    inputs: tuple[Spec, ...]
    partial: Spec
    y: Spec

    def ir(self, n: int) -> KernelIR:
        call = self.calls[n]
        dtypes = tuple(r.spec.dtype for r in call.tensors)
        return call.kernel.specialise(dtypes, (), call.constants, call.workgroup, call.face)


def step(
    shape: tuple[int, int, int, int, int, int], dtype: DType = f16, *masks: str,
    causal: bool = False, arch: str = "sm_90a",
) -> Step:  # fmt: skip
    """The launches for [batch, heads, kv_heads, lq, lk, dim]."""
    b, heads, kv_heads, lq, lk, dim = shape
    shapes = ((b, heads, lq, dim), (b, kv_heads, lk, dim), (b, kv_heads, lk, dim))
    kinds = {"lengths": ((b,), "i32"), "starts": ((b,), "i32"), "key_mask": ((b, lk), "bool"),
             "mask": ((b, heads, lq, lk), "f32")}  # fmt: skip
    inputs = [make_spec(s, dtype, 16) for s in shapes]
    inputs += [make_spec(kinds[m][0], dtype_of(kinds[m][1]), 16) for m in masks]
    attrs = {"causal": causal, "masks": masks, "scale": dim**-0.5, "variant": "split_mma"}
    y = make_spec((b, lq, heads, dim), dtype, 16)
    low = op.get("attention").form(tuple(inputs), (y,), attrs).lower(replace(CAPS, arch=arch))
    return Step(low.calls, tuple(inputs), low.temporaries[0], y)


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_ptx_equals_the_simulator(dtype: DType) -> None:
    made = step((1, 3, 1, 1, 90, 40), dtype, "lengths")
    rng = np.random.default_rng(5)
    words = [stored(rng.standard_normal(s.shape).astype(np.float32), s) for s in made.inputs[:3]]
    words += [np.array([75, 0, 0, 0], np.uint32), np.zeros(made.partial.shape, np.uint32)]
    again = [w.copy() for w in words]
    call, ir = made.calls[0], made.ir(0)
    params = np.array(parameter_words(call, ir)[0], np.uint32)
    orders: tuple[Any, ...] = tuple(ORDERS)
    for order in orders:
        simulate(ir, words, params, call.groups, order=order)
    execute(ir, "sm_80", again, params, call.groups)
    np.testing.assert_array_equal(again[-1], words[-1])


def test_groups_past_the_end_leave_at_once() -> None:
    """What parts without keys would have left is not written, and not read either."""
    made = step((2, 4, 2, 1, 1000, 16), f16, "lengths")
    splits = int(dict(made.calls[0].scalars)["splits"])
    assert splits == 16 and made.calls[0].groups == 2 * 2 * splits
    words = [np.zeros(s.storage_bytes // 4, np.uint32) for s in (*made.inputs, made.partial)]
    words[3][:2] = 65, 0
    call, ir = made.calls[0], made.ir(0)
    params = np.array(parameter_words(call, ir)[0], np.uint32)
    report = simulate(ir, words, params, call.groups)
    written = report.written[-1][: 8 * splits * 16].reshape(8, splits, 16).all(-1)
    assert (written == (np.arange(splits) < 2) & (np.arange(8) < 4)[:, None]).all()


def both(
    q: Array, k: Array, v: Array, dtype: DType, device: ct.Device, **masks: Any
) -> tuple[Array, Array]:
    """What the device computes, and float64 of the same rounded operands; heads first."""
    rounded = [narrow(x.astype(np.float32), dtype) for x in (q, k, v)]
    given: dict[str, Any] = {n: ct.asarray(x, device=device) for n, x in masks.items()}
    tensors = [ct.asarray(x, dtype, device) for x in rounded]
    got = ct.attention(*tensors, **given, variant="split_mma").astype("f32").numpy()
    formula = op.get("attention").reference
    assert formula is not None
    wide = [widen(x, dtype).astype(np.float64) for x in rounded]
    wanted = formula(*wide, *masks.values(), masks=tuple(masks), causal=False,
                     scale=q.shape[-1] ** -0.5)  # fmt: skip
    return got.astype(np.float64), wanted.transpose(0, 2, 1, 3)


@pytest.mark.devices("simulator", "cuda")
@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_a_maximum_that_moves_from_part_to_part(device: ct.Device, dtype: DType) -> None:
    """Scores rise to 800, fall to -800, and stay equal; many small weights before a large one."""
    n, rng = 400, np.random.default_rng(4)
    q = np.zeros((1, 4, 1, 16))
    q[..., 0] = 4
    k, v = rng.standard_normal((2, 1, 4, n, 16))
    k[..., 0] = 0
    k[0, 0, :, 0] = np.linspace(-800, 800, n)
    k[0, 1, :, 0] = np.linspace(800, -800, n)
    k[0, 3, -1, 0] = 17  # e^17 of them would weigh as much
    got, wanted = both(q, k, v, dtype, device)
    for head in range(4):
        error = np.linalg.norm(got[:, head] - wanted[:, head]) / np.linalg.norm(wanted[:, head])
        assert error < BOUND[dtype], head


@pytest.mark.devices("simulator", "cuda")
def test_what_does_not_count_may_hold_anything(device: ct.Device) -> None:
    """NaN past the lengths; an infinity among the rest stays where it is."""
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal(s) for s in ((2, 4, 1, 24), (2, 2, 150, 24), (2, 2, 150, 24)))
    lengths = np.array([67, 0], np.int32)
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = np.nan
    v[0, 0, 66, 3] = np.inf
    got, wanted = both(q, k, v, f16, device, lengths=lengths)
    assert (got[0, :2, :, 3] == np.inf).all() and not got[1].any()
    rest = np.isfinite(wanted)
    assert np.linalg.norm(got[rest] - wanted[rest]) < 5e-4 * np.linalg.norm(wanted[rest])
    assert np.isfinite(got).sum() == rest.sum()


@pytest.mark.devices("simulator", "cuda")
def test_weights_add_up_to_one(device: ct.Device) -> None:
    """Whatever their rounding: equal values come back as they are."""
    rng = np.random.default_rng(7)
    q, k = rng.standard_normal((1, 2, 2, 16)), rng.standard_normal((1, 1, 200, 16))
    got, _ = both(q, k, np.full((1, 1, 200, 16), 1.5), bf16, device)
    assert (got == 1.5).all()


@pytest.mark.devices("simulator", "cuda")
def test_one_plan_serves_every_length(device: ct.Device) -> None:
    """A replay at another length compiles, plans and launches nothing new."""
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal(s) for s in ((1, 4, 1, 16), (1, 2, 300, 16), (1, 2, 300, 16)))
    tensors = [ct.asarray(x.astype(np.float16), "f16", device) for x in (q, k, v)]
    lengths = ct.State(ct.zeros((1,), "i32", device), name="lengths")
    plan = device.compile(
        lambda: ct.attention(*tensors, lengths=lengths.value, variant="split_mma")
    )
    for count in (1, 64, 65, 300):
        lengths.assign(ct.full((1,), count, "i32", device))
        device.synchronize()
        with ct.ledger() as led:
            y = plan()
            device.synchronize()
        led.expect(launches=2, plans=0, compiles=0)
        got = y.astype("f32").numpy()
        _, wanted = both(q, k[:, :, :count], v[:, :, :count], f16, device)
        assert np.linalg.norm(got - wanted) < 5e-4 * np.linalg.norm(wanted)


@pytest.mark.devices("simulator", "webgpu", "cuda")
def test_it_is_refused_where_it_does_not_fit(device: ct.Device) -> None:
    for dim, dtype in ((16, "f32"), (20, "f16"), (136, "f16")):
        x = ct.zeros((1, 1, 70, dim), dtype, device)
        with pytest.raises(LimitError, match="variant 'split_mma' takes f16 or bf16 with rows on"):
            ct.attention(x[:, :, :1], x, x, variant="split_mma").numpy()


@needs_ptxas
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_it_stays_in_registers(arch: str, tmp_path: Path) -> None:
    """No spills, no stack, and as many groups a multiprocessor as the tile says."""
    every = ("lengths", "key_mask", "mask", "starts")
    for dim, dtype, masks in ((128, f16, ()), (128, bf16, ("starts",)), (64, f16, ("lengths",)),
                              (128, f16, every), (80, bf16, every)):  # fmt: skip
        made = step((1, 32, 8, 1, 4096, dim), dtype, *masks, arch=arch)
        for n in range(2):
            report, _ = assemble(emit_ptx(made.ir(n), arch), arch, tmp_path)
            registers, stack = resources(report)
            assert stack == 0 and "C75" not in report, report
            assert n or registers * TILE.threads * TILE.together <= 65_536, report


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_second_launch_lets_the_next_one_in(arch: str) -> None:
    made = step((1, 32, 8, 1, 4096, 128), arch=arch)
    said = ["griddepcontrol.launch_dependents" in emit_ptx(made.ir(n), arch) for n in range(2)]
    assert said == [False, arch == "sm_90a"]


def test_the_inner_loop_is_loads_and_products() -> None:
    """Of 16 keys, a head of 128: 8 chunks each of both, 16 products for scores, 8 for sums, 2."""
    text = emit_ptx(step((1, 32, 8, 1, 4096, 128)).ir(0), "sm_90a")
    inner = [x.split()[0] for x in text[text.index("// for") :].splitlines() if x.strip()]
    assert sum(s.startswith("ld.global") and ".v4" in s for s in inner) == 16
    assert sum(s.startswith("mma.sync") for s in inner) == 16 + 8 + 2
    assert not any(s.startswith("ld.shared") for s in inner[: inner.index("bar.sync")])
