"""Attention on tensor cores: every tile in the simulator, its PTX as text and through `ptxas`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, bf16, f16, narrow, widen
from centella.emit.program import Call, parameter_words
from centella.emit.ptx import emit_ptx, shared_layout
from centella.errors import LimitError
from centella.lang import KernelIR
from centella.op import op
from centella.ops.attention import lower as attention_lower
from centella.ops.attention.choice import LEAST_TILE, MMA_TILES
from centella.ops.attention.mma import MmaTile
from centella.ops.attention.wgmma import WgmmaTile
from centella.simulator.run import simulate
from centella.specs import Caps, Spec, make_spec
from tests.emit.test_lang_ptx import assemble, execute, needs_ptxas, resources
from tests.support.lang_common import ORDERS, Tensor

Array = np.ndarray[Any, Any]
CAPS = Caps("ptx", max_storage_buffers=64, max_workgroup=1024, max_shared=227 << 10,
            subgroups=True, arch="sm_90a")  # fmt: skip
# Head sizes and tiles that the sweep on a card may try, beside the shipped ones.
OTHERS = (
    (32, MmaTile(128, 64, 4, 2)),
    (32, MmaTile(128, 128, 4, 2)),
    (64, MmaTile(64, 64, 4, 3, together=3)),
    (64, MmaTile(128, 64, 8, 2, together=1)),
    (128, MmaTile(64, 64, 4, 2)),
    (128, MmaTile(128, 64, 8, 2, together=1)),
)
SMALLER = [(most, tile) for most, _, tile in MMA_TILES] + [(64, LEAST_TILE)]
SHIPPED = [(most, tile) for most, tile, _ in MMA_TILES]


def name_of(x: Any) -> str:
    return f"{x.queries}x{x.keys}x{x.warps}x{x.stages}" if isinstance(x, MmaTile) else str(x)


TILES = pytest.mark.parametrize(("dim", "tile"), [*SHIPPED, *OTHERS, *SMALLER], ids=name_of)


class Launch(NamedTuple):
    """A launch, what it reads, and what its masks are."""

    call: Call
    ir: KernelIR
    inputs: tuple[Spec, ...]
    attrs: dict[str, Any]
    masks: dict[str, Array]

    @property
    def y(self) -> Spec:
        """The result."""
        return self.call.tensors[-1].spec


def lowered(
    shape: tuple[int, int, int, int, int, int], dtype: DType = f16,
    tile: MmaTile | WgmmaTile | None = None, causal: bool = False, scale: float | None = None,
    **masks: Any,
) -> Launch:  # fmt: skip
    """The launch for [batch, heads, kv_heads, lq, lk, dim]."""
    launch, _, _ = lowered_in_steps(shape, dtype, tile, causal, scale, **masks)
    return launch


def lowered_in_steps(
    shape: tuple[int, int, int, int, int, int], dtype: DType = f16,
    tile: MmaTile | WgmmaTile | None = None, causal: bool = False, scale: float | None = None,
    **masks: Any,
) -> tuple[Launch, tuple[Call, ...], tuple[Spec, ...]]:  # fmt: skip
    """The last launch, all of them, and what is kept between them."""
    b, heads, kv_heads, lq, lk, dim = shape
    shapes = ((b, heads, lq, dim), (b, kv_heads, lk, dim), (b, kv_heads, lk, dim))
    inputs = [make_spec(s, dtype, 16) for s in shapes]
    made = {name: np.asarray(value) for name, value in masks.items()}
    kinds = {"lengths": "i32", "starts": "i32", "key_mask": "bool", "mask": "f32"}
    inputs += [make_spec(m.shape, ct.dtypes.dtype_of(kinds[n]), 16) for n, m in made.items()]
    variant = "wgmma" if isinstance(tile, WgmmaTile) else "mma"
    attrs = {"causal": causal, "masks": tuple(made), "scale": scale or dim**-0.5}
    attrs |= {"variant": variant}
    y = make_spec((b, lq, heads, dim), dtype, 16)
    with pytest.MonkeyPatch.context() as patch:
        if tile is not None:
            halved = dtype is bf16 and isinstance(tile, MmaTile)
            whole = replace(tile, parts=2) if halved else tile
            patch.setattr(attention_lower, f"{variant}_tile_of", lambda *_: whole)
        steps = op.get("attention").form(tuple(inputs), (y,), attrs).lower(CAPS)
    call = steps.calls[-1]
    return (
        Launch(call, specialised(call), tuple(inputs), attrs, made),
        steps.calls,
        steps.temporaries,
    )


def specialised(call: Call) -> KernelIR:
    dtypes = tuple(r.spec.dtype for r in call.tensors)
    return call.kernel.specialise(dtypes, (), call.constants, call.workgroup, call.face)


def stored(value: Array, spec: Spec) -> Array:
    """The words of a tensor; pads of 16-bit ones are NaN."""
    raw = np.full(spec.storage_bytes, 0xFF, np.uint8).view(spec.dtype.numpy)
    step = [s * spec.dtype.itemsize for s in spec.strides]
    np.ndarray(spec.shape, raw.dtype, raw.data, 0, step)[...] = narrow(value, spec.dtype)
    return raw.view(np.uint32)


def operands(launch: Launch, spread: float = 1.0) -> tuple[list[Array], Array]:
    """The words of everything, and the result in float64; q is `spread` times as wide."""
    rng = np.random.default_rng(5)
    words, wide = [], []
    for n, spec in enumerate(launch.inputs[:3]):
        value = rng.standard_normal(spec.shape).astype(np.float32) * (1.0 if n else spread)
        words.append(stored(value, spec))
        wide.append(widen(narrow(value, spec.dtype), spec.dtype).astype(np.float64))
    for mask, spec in zip(launch.masks.values(), launch.inputs[3:], strict=True):
        words.append(stored(mask, spec))
    words.append(np.full(launch.y.storage_bytes // 4, 0x7FC07FC0, np.uint32))
    formula = op.get("attention").reference
    assert formula is not None
    attrs = {n: launch.attrs[n] for n in ("masks", "causal", "scale")}
    return words, formula(*wide, *launch.masks.values(), **attrs)


def result(launch: Launch, words: list[Array]) -> Array:
    return Tensor(words[-1], launch.y.dtype, launch.y.shape, launch.y.strides, 0).numpy()


def run(launch: Launch, words: list[Array], **options: Any) -> Array:
    params = np.array(parameter_words(launch.call, launch.ir)[0], np.uint32)
    simulate(launch.ir, words, params, launch.call.groups, **options)
    return result(launch, words).astype(np.float64)


def error(got: Array, wanted: Array) -> float:
    """Squared error of the squares."""
    return float(((got - wanted) ** 2).sum() / (wanted**2).sum())


def shows_nan_and_infinity(tile: MmaTile | WgmmaTile) -> None:
    """A key that is NaN makes every result so; an infinite value, its column infinite."""
    launch = lowered((1, 1, 1, 18, 40, 16), f16, tile)
    words, _ = operands(launch)
    words[1].view(np.float16)[7 * 16 + 3] = np.nan
    assert np.isnan(run(launch, words)).all()
    words, _ = operands(launch)
    words[2].view(np.float16)[7 * 16 + 3] = np.inf
    got = run(launch, words)[0, :, 0]
    assert (got[:, 3] == np.inf).all() and np.isfinite(got[:, :3]).all()


BOUND = {f16: 2e-7, bf16: 5e-6}


def check(launch: Launch, spread: float = 1.0, **options: Any) -> None:
    words, wanted = operands(launch, spread)
    assert error(run(launch, words, **options), wanted) < BOUND[launch.y.dtype]


@TILES
def test_every_tile(dim: int, tile: MmaTile) -> None:
    """Past the last group's queries, once around the rings and into a tile's first keys."""
    shape = (1, 1, 1, tile.queries + 3, tile.keys * (tile.stages + 1) + 5, dim)
    launch = lowered(shape, f16, tile, causal=True)
    assert launch.ir.shared_bytes == tile.shared_bytes(dim)
    assert launch.ir.workgroup == tile.threads
    check(launch)


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("dim", [16, 20, 32, 40, 64, 72, 96, 128, 160, 256])
def test_head_sizes(dim: int, dtype: DType) -> None:
    check(lowered((1, 2, 1, 21, 70, dim), dtype))


MASKS: dict[str, dict[str, Any]] = {
    "lengths": {"lengths": [0, 33, 70]},
    "starts": {"starts": [-9, 0, 49]},
    "causal": {"causal": True},
    "key_mask": {"key_mask": np.arange(210).reshape(3, 70) % 3 > 0},
    "mask": {"mask": np.where(np.arange(70) % 5 == 2, -np.inf, np.linspace(-3, 3, 70))[None] *
             np.ones((3, 1, 37, 1))},
    "all": {"lengths": [70, 33, 1], "key_mask": np.arange(210).reshape(3, 70) % 3 > 0,
            "mask": np.linspace(-3, 3, 280).reshape(1, 4, 1, 70), "causal": True},
    "large scale": {"scale": 2.0},
    "negative scale": {"scale": -0.5, "causal": True},
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks_and_scales(name: str) -> None:
    check(lowered((3, 4, 2, 37, 70, 32), f16, LEAST_TILE, **MASKS[name]))


@pytest.mark.parametrize("order", ORDERS)
def test_orders(order: str) -> None:
    check(
        lowered((2, 2, 1, 35, 53, 24), bf16, LEAST_TILE, lengths=[50, 17], causal=True), order=order
    )


def test_a_maximum_that_moves() -> None:
    """By more than the slack and by less, in scores from -800 to 800: f16 weights up to 2^8."""
    shape = (1, 4, 4, 32, 256, 16)
    launch = lowered(shape, f16, LEAST_TILE, scale=0.5)
    words, _ = operands(launch)
    q = np.zeros((*shape[:2], 32, 16), np.float32)
    q[..., 0] = 2
    rng = np.random.default_rng(2)
    k, v = rng.standard_normal((2, 1, 4, 256, 16)).astype(np.float32)
    steep = np.linspace(-800, 800, 256)
    k[0, :, :, 0] = np.stack([steep, steep[::-1], steep / 50, np.arange(256) // 16 * 4.0])
    words[:3] = [stored(x, s) for x, s in zip((q, k, v), launch.inputs, strict=True)]
    wide = [narrow(x, f16).astype(np.float64) for x in (q, k, v)]
    formula = op.get("attention").reference
    assert formula is not None
    wanted = formula(*wide, masks=(), causal=False, scale=0.5)
    got = run(launch, words)
    for head in range(4):
        assert error(got[:, :, head], wanted[:, :, head]) < 2e-7


def test_what_does_not_count_may_hold_anything() -> None:
    """NaN past the lengths and where key_mask is False; a NaN and an infinity among the rest."""
    shape, seen = (2, 1, 1, 18, 40, 16), np.arange(80).reshape(2, 40) % 4 > 0
    for masks in ({"lengths": [19, 0]}, {"key_mask": seen}):
        launch = lowered(shape, f16, LEAST_TILE, **masks)
        words, wanted = operands(launch)
        hidden = ~seen if "key_mask" in masks else np.arange(40) >= np.array([[19], [0]])
        for n in (1, 2):
            held = words[n].view(np.float16).reshape(2, 40, 16)
            held[hidden] = np.nan
        assert error(run(launch, words), wanted) < 2e-7
        assert "key_mask" in masks or not run(launch, words)[1].any()
    shows_nan_and_infinity(LEAST_TILE)


def test_weights_add_up_to_one() -> None:
    """Whatever their rounding: equal values come back as they are."""
    launch = lowered((1, 1, 1, 20, 100, 16), bf16, LEAST_TILE)
    words, _ = operands(launch)
    words[2][:] = 0x3FC03FC0  # 1.5
    assert (run(launch, words) == 1.5).all()


@pytest.mark.devices("simulator", "cuda")
def test_views_of_one_product(device: ct.Device) -> None:
    """q, k and v beside each other in a row, as a linear layer leaves them."""
    rng, heads, dim = np.random.default_rng(3), 2, 16
    qkv = ct.asarray(rng.standard_normal((2, 40, 3 * heads * dim)), "f16", device)
    whole = qkv.reshape(2, 40, 3, heads, dim).permute(2, 0, 3, 1, 4)
    q, k, v = whole[0], whole[1], whole[2]
    got = ct.attention(q, k, v, causal=True, variant="mma").astype("f32").numpy()
    formula = op.get("attention").reference
    assert formula is not None
    wide = [x.astype("f32").numpy().astype(np.float64) for x in (q, k, v)]
    wanted = formula(*wide, masks=(), causal=True, scale=0.25).transpose(0, 2, 1, 3)
    assert error(got, wanted) < 2e-7


@pytest.mark.devices("simulator", "webgpu", "cuda")
def test_it_is_refused_where_it_does_not_fit(device: ct.Device) -> None:
    with pytest.raises(LimitError, match="variant 'mma' takes f16 or bf16 with rows on 16 bytes"):
        ct.attention(*[ct.zeros((1, 1, 20, 16), device=device)] * 3, variant="mma").numpy()
    odd = ct.zeros((1, 1, 20, 17), "f16", device)[:, :, :, 1:]
    with pytest.raises(LimitError, match="rows on 16 bytes"):
        ct.attention(odd, odd, odd, variant="mma").numpy()


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_ptx_equals_the_simulator(dtype: DType) -> None:
    launch = lowered((1, 2, 1, 19, 37, 24), dtype, MmaTile(32, 16, 1, 2), causal=True)
    words, _ = operands(launch)
    again = [w.copy() for w in words]
    params = np.array(parameter_words(launch.call, launch.ir)[0], np.uint32)
    simulate(launch.ir, words, params, launch.call.groups)
    execute(launch.ir, "sm_80", again, params, launch.call.groups)
    np.testing.assert_array_equal(again[-1], words[-1])


@needs_ptxas
@TILES
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_tiles_stay_in_registers(dim: int, tile: MmaTile, arch: str, tmp_path: Path) -> None:
    """No spills, no stack, no warning, and as many groups a multiprocessor as the tile says."""
    lengths, keys = {"lengths": [4096]}, np.ones((1, 4096))
    given: list[tuple[DType, dict[str, Any]]] = [(f16, {})]
    if (dim, tile) in SHIPPED:
        both = [(dtype, {"causal": True, **lengths}) for dtype in (f16, bf16)]
        given += [(bf16, {}), *both, (bf16, {"starts": [1]})]
    if (dim, tile) in SMALLER:
        every = {"mask": keys[None, None], "key_mask": keys, "starts": [0], **lengths}
        given = [(bf16, {}), (f16, every)]
    for dtype, masks in given:
        launch = lowered((1, 4, 2, 4096, 4096, dim), dtype, tile, **masks)
        report, _ = assemble(emit_ptx(launch.ir, arch), arch, tmp_path)
        registers, stack = resources(report)
        print(f"{dim} {tile} {arch} {list(masks)}: {registers} registers")
        assert stack == 0 and "C75" not in report, report
        assert registers * tile.threads * tile.together <= 65_536, report


def test_the_inner_loop_is_matrix_work() -> None:
    """Of a step, a warp of 32 queries: products of Q and K, of P and V, and the sums of P."""
    launch = lowered((1, 1, 1, 4096, 4096, 64), f16, MmaTile(128, 64, 4, 2))
    text = emit_ptx(launch.ir, "sm_90a")
    body = text[text.index("// for") : text.rindex("setp.lt")]
    inner = [line.split()[0] for line in body.splitlines() if line.strip()]
    assert sum(s.startswith("mma.sync") for s in inner) == 64 + 64 + 8
    assert sum(s.startswith("ldmatrix") for s in inner) == 16 + 16
    assert sum(s.startswith("cp.async.cg") for s in inner) == 8
    assert sum(s.startswith("ex2") for s in inner) == 64 + 4
    assert sum(s.startswith("shfl") for s in inner) == 8
    assert shared_layout(launch.ir).size == 48 << 10
