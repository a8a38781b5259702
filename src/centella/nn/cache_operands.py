"""What a cache of keys and values takes: checked before anything is recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import DType, f32, i8, i32
from centella.errors import DTypeError, KVCacheFullError, ShapeError
from centella.tensors.arguments import check_tensors
from centella.tensors.tensor import Tensor


class Operands(Struct, frozen=True):
    """Checks of a cache's operands; each raises ShapeError, DTypeError or KVCacheFullError.

    Attributes:
        shape: batch, num_kv_heads, capacity, width of a row; dtype: of keys and values.
        num_layers: of the cache; head_dim, value_dim: sizes of keys, and of values.
    """

    shape: tuple[int, int, int, int]
    dtype: DType
    num_layers: int
    head_dim: int
    value_dim: int

    def narrowed(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values without what fills their rows."""
        return (k if self.head_dim == k.shape[3] else k[..., : self.head_dim], self.values_of(v))

    def values_of(self, rows: Tensor) -> Tensor:
        """Values, or what was attended to, without what fills their rows."""
        return rows if self.value_dim == rows.shape[3] else rows[..., : self.value_dim]

    def by_head(
        self, name: str, qkv: Tensor, cos: Tensor, sin: Tensor, layer: int, qk_norm: Tensor | None
    ) -> Tensor:
        """A product of q, k and v as [batch, heads + 2 num_kv_heads, tokens, head_dim]."""
        self.check_layer(layer)
        if self.head_dim != self.value_dim:
            raise ShapeError(
                f"{name}: expected values of the size of keys, got a cache with value_dim="
                f"{self.value_dim} for {self.head_dim}; append and attend take them"
            )
        check_tensors(name, qkv, cos, sin, *(() if qk_norm is None else (qk_norm,)))
        b, kv_heads, _, dim = self.shape
        fits = qkv.ndim == 3 and qkv.shape[0] == b and qkv.shape[1] and not qkv.shape[2] % dim
        heads = qkv.shape[2] // dim - 2 * kv_heads if fits else 0
        if heads < 1 or heads % kv_heads:
            raise ShapeError(
                f"{name}: expected qkv [{b}, tokens, (heads + {2 * kv_heads}) * {dim}], heads "
                f"a multiple of {kv_heads}, got {list(qkv.shape)}"
            )
        self.check_room(qkv.shape[1])
        return qkv.reshape(b, qkv.shape[1], heads + 2 * kv_heads, dim).permute(0, 2, 1, 3)

    def check_taken(self, other: Operands, lengths: tuple[int, ...], at: Tensor) -> None:
        """Another cache, of sequences of these lengths, and which of them are taken."""
        mine, theirs = (
            {"num_layers": x.num_layers, "num_kv_heads": x.shape[1], "head_dim": x.head_dim,
             "value_dim": x.value_dim} for x in (self, other)
        )  # fmt: skip
        if mine != theirs:
            raise ShapeError(f"take: expected a cache of {_said(mine)}, got {_said(theirs)}")
        rows = f32 if other.dtype is i8 else other.dtype
        if self.dtype is not i8 and rows is not self.dtype:
            raise DTypeError(f"take: expected rows of {self.dtype.name}, got {rows.name}")
        check_tensors("take", at)
        if at.dtype is not i32 or at.shape != self.shape[:1]:
            raise ShapeError(
                f"take: expected at [{self.shape[0]}] i32, got {list(at.shape)} {at.dtype.name}"
            )
        self.check_room(max(lengths))

    def check_layer(self, layer: Any) -> None:
        """A number of a layer."""
        if not isinstance(layer, (int, np.integer)) or not 0 <= layer < self.num_layers:
            raise ShapeError(f"KVCache: expected a layer below {self.num_layers}, got {layer}")

    def check(self, k: Tensor, v: Tensor, layer: int) -> None:
        """Keys and values of a layer, of as many tokens."""
        self.check_layer(layer)
        b, heads, _, _ = self.shape
        check_tensors("KVCache", k, v)
        for name, x, dim in (("k", k, self.head_dim), ("v", v, self.value_dim)):
            wrong = x.ndim != 4 or x.shape[:2] != (b, heads) or x.shape[3] != dim
            if wrong or x.shape[2] != k.shape[2] or not x.shape[2]:
                raise ShapeError(
                    f"KVCache: expected {name} [{b}, {heads}, tokens, {dim}], got {list(x.shape)}"
                )
            if x.dtype is not self.dtype and not (self.dtype is i8 and x.dtype is k.dtype):
                raise DTypeError(
                    f"KVCache: expected {name} of {self.dtype.name}, got {x.dtype.name}"
                )
        self.check_room(k.shape[2])

    def check_room(self, tokens: int) -> None:
        """Tokens of a step."""
        if tokens > self.shape[2]:
            raise KVCacheFullError(
                f"KVCache: {tokens:,} tokens at once; the capacity is {self.shape[2]:,}"
            )

    def check_queries(self, q: Tensor, tokens: int) -> None:
        """Queries of a step."""
        b, heads, dim = *self.shape[:2], self.head_dim
        fits = q.ndim == 4 and (q.shape[0], q.shape[2], q.shape[3]) == (b, tokens, dim)
        if not fits or q.shape[1] % heads:
            raise ShapeError(
                f"attend: expected q [{b}, a multiple of {heads}, {tokens}, {dim}], got "
                f"{list(q.shape)}"
            )


def _said(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
