"""`CacheLayer`: the keys and values of one layer of a cache, and the ops that write and read them.

Two States, or three in i8: numbers of -127 to 127 and the scales of their rows. `KVCache` has one
with its sequences outermost, `BlockCache` one of blocks; the ops tell them by starts or a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from centella.dtypes import DType, f32, i8
from centella.errors import DTypeError
from centella.op.op import Op, get
from centella.ops.rows_i8 import PLANE
from centella.runtime.device import Device
from centella.specs import Shape
from centella.tensors.arguments import epsilon
from centella.tensors.creation import full
from centella.tensors.functional import attention, pad, rms_norm, rope
from centella.tensors.functional.attend import score_attrs
from centella.tensors.state import State
from centella.tensors.tensor import Tensor, apply_all, apply_preferred


def check_storage(op: str, dtype: DType) -> None:
    """Raise unless a cache has such a dtype.

    Raises:
        DTypeError: neither a float nor i8.
    """
    if not (dtype.is_float or dtype is i8):
        raise DTypeError(f"{op}: expected a float dtype or i8, got {dtype.name}")


def planes_of(shape: Shape, dtype: DType) -> dict[str, tuple[Shape, DType]]:
    """The States of a layer by name: shape and dtype of each.

    Args:
        shape, dtype: of the keys.
    """
    planes = {"keys": (shape, dtype), "values": (shape, dtype)}
    return planes | ({"scales": ((*shape[:-1], PLANE), f32)} if dtype is i8 else {})


def widened(x: Tensor, width: int) -> Tensor:
    """Rows with zeros behind them, up to a width."""
    more = width - x.shape[3]
    return pad(x, [(0, 0)] * 3 + [(0, more)]) if more else x


class CacheLayer:
    """Keys and values of a layer.

    Args:
        shape: of the keys, and of the values: head_dim last.
        dtype: a float, or i8.
        owner: the class of the cache; number: of the layer. Messages name both.

    Attributes:
        keys, values: where they are.
        scales: f32, of the same shape with 2 in the place of head_dim; None but in i8.
    """

    def __init__(
        self, shape: Shape, dtype: DType, device: str | Device | None, owner: str, number: int
    ) -> None:
        states = {
            name: State.empty(*plane, device, name=f"{owner} {name} of layer {number}")
            for name, plane in planes_of(shape, dtype).items()
        }
        self.keys: State = states["keys"]
        self.values: State = states["values"]
        self.scales: State | None = states.get("scales")

    @property
    def states(self) -> tuple[State, ...]:
        """Everything that is stored."""
        return (self.keys, self.values, *(() if self.scales is None else (self.scales,)))

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(state.nbytes for state in self.states)

    def reset(self) -> None:
        """Zeros everywhere."""
        for state in self.states:
            state.assign(full((), 0, state.dtype, state.device))

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """Keys and values as they are now; in i8 their numbers, and scales."""
        return tuple(state.value for state in self.states)

    def _op(self, name: str) -> Op[Any]:
        return get(name if self.scales is None else f"{name}_i8")

    def rows(self, pick: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Some keys and values as floats: as they are, or numbers times their scales, in f32.

        Args:
            pick: takes these rows out of a tensor that is `stored`.
        """
        keys, values, *more = (pick(x) for x in self.stored)
        if not more:
            return keys, values
        (scales,) = more
        return keys.astype(f32) * scales[..., :1], values.astype(f32) * scales[..., 1:]

    def write(self, k: Tensor, v: Tensor, starts: Tensor) -> None:
        """Write rows, from positions on or where a table says: as the op `cache_write`."""
        k, v = (widened(x, self.keys.shape[3]) for x in (k, v))
        apply_all(self._op("cache_write"), (*self.stored, k, v, starts), {})

    def copy(self, copies: Tensor) -> None:
        """Copy blocks into others: as the op `cache_copy`."""
        apply_all(self._op("cache_copy"), (*self.stored, copies), {})

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, mask: Tensor | None
    ) -> Tensor:  # fmt: skip
        """Write a step's keys and values, then `attend`: one launch where that is to be had."""
        operands = (self.keys.value, self.values.value, q, k, v, starts)
        attrs = {"scale": q.shape[-1] ** -0.5}
        wide = self.scales is None and mask is None and k.shape == v.shape
        results = apply_preferred(get("cache_attend"), operands, attrs) if wide else None
        if results is None:
            self.write(k, v, starts)
            return self.attend(q, starts=starts, mask=mask)
        y: Tensor = results[2]
        return y.permute(0, 2, 1, 3)

    def write_qkv(
        self, x: Tensor, kv_heads: int, cos: Tensor, sin: Tensor, starts: Tensor, *,
        qk_norm: Tensor | None, eps: float, interleaved: bool,
    ) -> Tensor:  # fmt: skip
        """Write keys and values from the product of q, k and v, with rotary embedding; q, turned.

        One launch, or those of the ops that it stands for, where one above a binding is divided.

        Args:
            x: [batch, heads + 2 kv_heads, tokens, head_dim].
            starts: positions [batch], or a table [batch, 1 + width].
        """
        norms = () if qk_norm is None else (qk_norm,)
        attrs = {"interleaved": bool(interleaved), "eps": epsilon("append_qkv", eps)}
        operands = (*self.stored, x, cos, sin, starts, *norms)
        results = apply_preferred(self._op("rope_cache_write"), operands, attrs)
        if results is not None:
            queries: Tensor = results[-1]
            return queries
        heads = x.shape[1] - 2 * kv_heads
        both = [x[:, :heads], x[:, heads : heads + kv_heads]]
        if qk_norm is not None:
            both = [rms_norm(part, qk_norm[n], eps=eps) for n, part in enumerate(both)]
        first = starts if starts.ndim == 1 else starts[:, 0]
        q, k = (rope(part, cos, sin, first, interleaved=interleaved) for part in both)
        self.write(k, x[:, heads + kv_heads :], starts)
        return q

    def attend_qkv(
        self, x: Tensor, kv_heads: int, cos: Tensor, sin: Tensor, starts: Tensor, *,
        qk_norm: Tensor | None, eps: float, interleaved: bool, scale: float | None,
        window: int | None, softcap: float | None,
    ) -> Tensor:  # fmt: skip
        """`write_qkv`, then attention of the queries, causally: the op `rope_attend`.

        Returns:
            [batch, heads, tokens, head_dim].
        """
        norms = () if qk_norm is None else (qk_norm,)
        attrs: dict[str, Any] = {"interleaved": bool(interleaved)}
        attrs["eps"] = epsilon("attend_qkv", eps)
        attrs |= score_attrs("attend_qkv", x.shape[3], scale, window, softcap)
        operands = (self.keys.value, self.values.value, x, cos, sin, starts, *norms)
        wide = self.scales is None
        results = apply_preferred(get("rope_attend"), operands, attrs) if wide else None
        if results is not None:
            y: Tensor = results[2]
            return y.permute(0, 2, 1, 3)
        q = self.write_qkv(
            x, kv_heads, cos, sin, starts, qk_norm=qk_norm, eps=eps, interleaved=interleaved
        )
        where = {"starts": starts}
        if starts.ndim == 2:
            where = {"starts": starts[:, 0], "blocks": starts[:, 1:]}
        return self.attend(q, **where, scale=scale, window=window, softcap=softcap)

    def attend(self, q: Tensor, **options: Any) -> Tensor:
        """`ct.attention` of q over what is there, as wide as its rows."""
        scales = None if self.scales is None else self.scales.value
        if q.shape[3] < self.keys.shape[3]:
            if options.get("scale") is None:
                options["scale"] = q.shape[3] ** -0.5
            q = widened(q, self.keys.shape[3])
        return attention(q, self.keys.value, self.values.value, scales=scales, **options)
