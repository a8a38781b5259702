"""Launches of attention outside a device: planned with a tile, run in the simulator, compared."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, bf16, dtype_of, f16, i8
from centella.emit.program import Call
from centella.lang import KernelIR
from centella.ops.attention.choice import ORDER
from centella.ops.attention.mma import MmaTile
from centella.ops.attention.op import ATTENTION, reference
from centella.simulator.run import Report, simulate
from centella.specs import Caps, Spec, make_spec
from tests.support.lang_common import Tensor
from tests.support.launched import laid_out, op_form, parameters, rounded, traced

Array = np.ndarray[Any, Any]
Shape = tuple[int, int, int, int, int, int]
CAPS = Caps("ptx", max_storage_buffers=64, max_workgroup=1024, max_shared=227 << 10,
            subgroups=True, arch="sm_90a")  # fmt: skip
BOUND = {f16: 2e-7, bf16: 5e-6}  # squared error of the squares
KINDS = {"lengths": "i32", "starts": "i32", "key_mask": "bool", "mask": "f32", "sinks": "f32",
         "bias": "f32", "offsets": "i32", "blocks": "i32", "scales": "f32"}  # fmt: skip
VARIANTS = {variant.name: variant for variant in ORDER}


class Plan(NamedTuple):
    """The launches of an attention, and what it is about."""

    calls: tuple[Call, ...]
    inputs: tuple[Spec, ...]
    y: Spec
    kept: tuple[Spec, ...]
    attrs: dict[str, Any]
    masks: dict[str, Array]

    def ir(self, n: int = -1) -> KernelIR:
        """The kernel of a launch, else of the last."""
        return traced(self.calls[n])

    def params(self, n: int = -1) -> Array:
        """The parameters of a launch."""
        return parameters(self.calls[n], self.ir(n))

    def words(self, q: Array, k: Array, v: Array) -> list[Array]:
        """The memory of inputs, result and temporaries, which begin as NaN."""
        pairs = zip((q, k, v, *self.masks.values()), self.inputs, strict=True)
        unwritten = [laid_out(None, spec) for spec in (self.y, *self.kept)]
        return [*(laid_out(value, spec) for value, spec in pairs), *unwritten]

    def simulated(self, words: list[Array], n: int = -1, **options: Any) -> Report:
        """Run one launch."""
        call = self.calls[n]
        memory = [words[r.index] for r in call.tensors]
        return simulate(self.ir(n), memory, self.params(n), call.groups, **options)

    def run(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        """The result of all launches."""
        words = self.words(q, k, v)
        for n in range(len(self.calls)):
            self.simulated(words, n, **options)
        return self.result(words)

    def result(self, words: list[Array]) -> Array:
        """What the memory of the result holds, [batch, query, head, element]."""
        y = Tensor(words[len(self.inputs)], self.y.dtype, self.y.shape, self.y.strides, 0)
        return y.numpy().astype(np.float64)

    def exact(self, *arrays: Array) -> Array:
        """The result in float64, of operands as they are stored."""
        return exact(arrays, self.y.dtype, self.masks, **self.attrs)

    def random(self, spread: float = 1.0) -> list[Array]:
        """Values of q, k and v; q is `spread` times as wide."""
        rng = np.random.default_rng(5)
        return [rng.standard_normal(s.shape).astype(np.float32) * (1.0 if n else spread)
                for n, s in enumerate(self.inputs[:3])]  # fmt: skip

    def check(self, **options: Any) -> None:
        """Random numbers are right within the bound."""
        arrays = self.random()
        assert error(self.run(*arrays, **options), self.exact(*arrays)) < BOUND[self.y.dtype]


def planned(
    variant: str, shape: Shape, dtype: DType = f16, tile: Any = None, *, caps: Caps = CAPS,
    causal: bool = False, scale: float | None = None, window: int | None = None,
    softcap: float | None = None, **masks: Any,
) -> Plan:  # fmt: skip
    """The launches for [batch, heads, kv_heads, lq, lk, dim], by a tile or the chosen one.

    With blocks `lk` is how many there are in the pool; with scales k and v are i8.
    """
    b, heads, kv_heads, lq, lk, dim = shape
    k = (kv_heads, lk, 64, dim) if "blocks" in masks else (b, kv_heads, lk, dim)
    shapes = ((b, heads, lq, dim), k, k)
    arrays = {name: np.asarray(value) for name, value in masks.items()}
    stored = i8 if "scales" in masks else dtype
    kinds = (dtype, stored, stored)
    inputs = [make_spec(s, kind, 16) for s, kind in zip(shapes, kinds, strict=True)]
    inputs += [make_spec(a.shape, dtype_of(KINDS[n]), 16) for n, a in arrays.items()]
    attrs = {"causal": causal, "scale": scale or dim**-0.5, "window": window, "softcap": softcap}
    y, kernel = make_spec((b, lq, heads, dim), dtype, 16), VARIANTS[variant]
    form = op_form(ATTENTION, tuple(inputs), (y,), {**attrs, "masks": tuple(arrays)})
    if isinstance(tile, MmaTile) and dtype is bf16:
        tile = replace(tile, parts=2)
    lowered = kernel.launches(form, tile or kernel.tile(form, caps), caps)
    return Plan(lowered.calls, tuple(inputs), y, lowered.temporaries, attrs, arrays)


def exact(
    arrays: Any, dtype: DType, masks: dict[str, Any], causal: bool = False, scale: float = 0.0,
    **attrs: Any,
) -> Array:  # fmt: skip
    """Attention in float64 of what a dtype stores, [batch, query, head, element]."""
    wide = [rounded(np.asarray(x, np.float32), dtype) for x in arrays]
    scale = scale or wide[0].shape[-1] ** -0.5
    given = (*wide, *masks.values())
    return np.asarray(reference(*given, masks=tuple(masks), causal=causal, scale=scale, **attrs))


def error(got: Array, wanted: Array) -> float:
    """Squared error of the squares."""
    return float(((got - wanted) ** 2).sum() / (wanted**2).sum())


def steep(keys: int) -> Array:
    """First elements of keys: scores that rise, fall, and grow by less than the slack, or more."""
    rise = np.linspace(-800, 800, keys)
    return np.stack([rise, rise[::-1], rise / 50, np.arange(keys) // 16 * 4.0])


def on_device(
    device: ct.Device, arrays: Any, dtype: DType, variant: str | None = None, **attrs: Any
) -> Array:
    """What a device computes, [batch, query, head, element]; arrays among `attrs` are masks."""
    given: dict[str, Any] = {n: ct.asarray(x, device=device) if isinstance(x, np.ndarray) else x
                             for n, x in attrs.items()}  # fmt: skip
    tensors = [ct.asarray(x, dtype, device) for x in arrays]
    got = ct.attention(*tensors, **given, variant=variant).astype("f32").numpy()
    return got.transpose(0, 2, 1, 3).astype(np.float64)
