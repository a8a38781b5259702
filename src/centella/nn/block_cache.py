"""`BlockCache`: the keys and values of many sequences, in blocks of one pool on the device.

Each layer has two States, `[kv_heads, blocks, 64, head_dim]`, written in place. Which blocks a
sequence has says a table, which the host gives with each step (`BlockTable`); so sequences of any
lengths come and go, share what they begin with, and nothing is moved. A captured step takes the
table as an input: one plan serves all tables of its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from centella.dtypes import DType, dtype_of, f32, i32
from centella.errors import DTypeError, ShapeError
from centella.nn.block_table import BLOCK, Blocks, BlockTable
from centella.nn.room import check_cache
from centella.op.op import get
from centella.runtime.device import Device, current_device
from centella.runtime.device import device as open_device
from centella.tensors.arguments import check_tensors, epsilon, whole
from centella.tensors.creation import full
from centella.tensors.functional import attention, gather, rms_norm, rope
from centella.tensors.functional.products import score_attrs
from centella.tensors.jit import Jitted
from centella.tensors.state import State
from centella.tensors.tensor import Tensor, apply_all

Array = np.ndarray[Any, Any]


class BlockCache:
    """Keys and values in blocks of 64 tokens, which any number of sequences share.

    Args:
        num_kv_heads, head_dim: heads of keys and values, and their size.
        blocks: of the pool; one more is there for what nobody needs.
        num_layers: layers, which all have the same blocks.
        dtype: storage of keys and values.

    Attributes:
        blocks: which of them are free: the host's side.

    Raises:
        ShapeError: a size below 1.
        DTypeError: a dtype that is not a float.
        OutOfMemoryError: the device has no room for the pool; says how much is needed, and what is
            free. LimitError: a State of it is larger than a buffer may be.
    """

    def __init__(
        self, num_kv_heads: int, head_dim: int, blocks: int, *, num_layers: int = 1,
        dtype: Any = f32, device: str | Device | None = None,
    ) -> None:  # fmt: skip
        given = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "blocks": blocks,
                 "num_layers": num_layers}  # fmt: skip
        for name, value in given.items():
            whole("BlockCache", name, value, 1)
        self.dtype: DType = dtype_of(dtype)
        if not self.dtype.is_float:
            raise DTypeError(f"BlockCache: expected a float dtype, got {self.dtype.name}")
        self.shape: tuple[int, int, int, int] = (num_kv_heads, blocks + 1, BLOCK, head_dim)
        self.device: Device = current_device() if device is None else open_device(device)
        fewer = f"fewer tokens ({blocks * BLOCK:,}) for all sequences together"
        check_cache("BlockCache", self.shape, self.dtype, 2 * num_layers, self.device, fewer)
        self.blocks: Blocks = Blocks(blocks + 1)
        self._layers = [
            tuple(State.empty(self.shape, self.dtype, self.device, name=f"{name} of layer {i}")
                  for name in ("keys", "values"))
            for i in range(num_layers)
        ]  # fmt: skip
        self._copy: Jitted[..., None] = Jitted(self._copied, self.device)
        self.reset()

    def __repr__(self) -> str:
        return (
            f"<BlockCache {list(self.shape)} {self.dtype.name}, {len(self._layers)} layers, "
            f"{self.blocks.free} blocks free on {self.device.name}>"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(state.nbytes for pair in self._layers for state in pair)

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self._layers)

    def reset(self) -> None:
        """Zeros everywhere; in the block of nobody they stay, for padding to read."""
        for state in (state for pair in self._layers for state in pair):
            state.assign(full((), 0, state.dtype, self.device))

    def sequence(self) -> BlockTable:
        """An empty sequence, which takes its blocks from this pool."""
        return BlockTable(self.blocks)

    def states(self, layer: int) -> tuple[Tensor, Tensor]:
        """The pools of a layer, [num_kv_heads, blocks + 1, 64, head_dim] each."""
        keys, values = self._layers[layer]
        return keys.value, values.value

    def view(self, table: Tensor) -> BlockView:
        """Some sequences, to begin a step of theirs: what a decoder takes as its cache.

        Args:
            table: [batch, 1 + width] i32: `rows` says what is in it.
        """
        return BlockView(self, table)

    def rows(self, tables: Sequence[tuple[int, BlockTable]], batch: int, width: int) -> Array:
        """The table of a step: of each sequence the position of its first token, then its blocks.

        Args:
            tables: that position, and the sequence.
            batch: rows; those without a sequence write nothing. width: blocks of a row.
        """
        rows = np.zeros((batch, 1 + width), np.int32)
        for row, (start, table) in zip(rows, tables, strict=False):
            row[0] = start
            row[1 : 1 + len(table.blocks)] = table.blocks
        return rows

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, as `BlockTable.reserve` asks: from, to."""
        for source, target in pairs:
            self._copy(np.array([source], np.int32), np.array([[0, target]], np.int32))

    def _copied(self, source: Tensor, target: Tensor) -> None:
        for layer in range(self.num_layers):
            pools = self.states(layer)
            k, v = (gather(pool, source, 1).permute(1, 0, 2, 3) for pool in pools)
            apply_all(get("cache_write"), (*pools, k, v, target), {})


class BlockView:
    """A step's sequences: a decoder appends keys and values to it, and attends to what is there.

    Attributes:
        shape: batch, kv_heads, capacity, head_dim, as a `KVCache` has it.
    """

    def __init__(self, cache: BlockCache, table: Tensor) -> None:
        check_tensors("BlockView", table)
        if table.ndim != 2 or table.shape[1] < 2 or table.dtype is not i32:
            raise ShapeError(
                f"BlockView: expected an i32 table [batch, 1 + width], got {table.dtype.name} "
                f"{list(table.shape)}"
            )
        heads, _, size, dim = cache.shape
        batch, width = table.shape[0], table.shape[1] - 1
        self.shape: tuple[int, int, int, int] = (batch, heads, width * size, dim)
        self.positions: Tensor = table[:, 0]
        self._blocks = table[:, 1:]
        self._cache = cache
        self._table = table

    @property
    def capacity(self) -> int:
        """Keys that the tables have room for."""
        return self.shape[2]

    def begin(self, tokens: int = 1) -> Tensor:
        """The positions of the step's first tokens, [batch] i32."""
        return self.positions

    def append_qkv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, layer: int = 0, *,
        qk_norm: Tensor | None = None, eps: float = 1e-6, interleaved: bool = False,
    ) -> Tensor:  # fmt: skip
        """As `KVCache.append_qkv`."""
        x, pools = self._by_head(qkv), self._cache.states(layer)
        norms = () if qk_norm is None else (qk_norm,)
        if self._within_binding(qkv, layer):
            attrs = {"interleaved": interleaved, "eps": epsilon("append_qkv", eps)}
            given = (*pools, x, cos, sin, self._table, *norms)
            queries: Tensor = apply_all(get("rope_cache_write"), given, attrs)[2]
            return queries
        kv_heads = self.shape[1]
        heads = x.shape[1] - 2 * kv_heads
        both = [x[:, :heads], x[:, heads : heads + kv_heads]]  # each divided by heads
        if qk_norm is not None:
            both = [rms_norm(part, qk_norm[n], eps=eps) for n, part in enumerate(both)]
        q, k = (rope(part, cos, sin, self.positions, interleaved=interleaved) for part in both)
        apply_all(get("cache_write"), (*pools, k, x[:, heads + kv_heads :], self._table), {})
        return q

    def attend_qkv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, layer: int = 0, *,
        qk_norm: Tensor | None = None, eps: float = 1e-6, interleaved: bool = False,
        scale: float | None = None, window: int | None = None, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """As `KVCache.attend_qkv`."""
        if not self._within_binding(qkv, layer):
            q = self.append_qkv(
                qkv, cos, sin, layer, qk_norm=qk_norm, eps=eps, interleaved=interleaved
            )
            return self.attend(q, layer, scale=scale, window=window, softcap=softcap)
        attrs: dict[str, Any] = {"interleaved": interleaved, "eps": epsilon("attend_qkv", eps)}
        attrs |= score_attrs("attend_qkv", self.shape[3], scale, window, softcap)
        if attrs.get("window", 0) >= self.capacity:
            del attrs["window"]  # all keys are within it
        norms = () if qk_norm is None else (qk_norm,)
        pools = self._cache.states(layer)
        given = (*pools, self._by_head(qkv), cos, sin, self._table, *norms)
        y: Tensor = apply_all(get("rope_attend"), given, attrs)[2]
        return y.permute(0, 2, 1, 3)

    def _by_head(self, qkv: Tensor) -> Tensor:
        """A product of q, k and v as [batch, heads + 2 num_kv_heads, tokens, head_dim]."""
        batch, tokens, width = qkv.shape
        dim = self.shape[3]
        return qkv.reshape(batch, tokens, width // dim, dim).permute(0, 2, 1, 3)

    def _within_binding(self, qkv: Tensor, layer: int) -> bool:
        """Whether a launch may see all of a layer's pools and of a product at once."""
        largest = max(t.spec.storage_bytes for t in (*self._cache.states(layer), qkv))
        return largest <= self._cache.device.caps.safe_binding

    def attend(
        self, q: Tensor, layer: int = 0, *, scale: float | None = None,
        mask: Tensor | None = None, window: int | None = None, softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As `KVCache.attend`."""
        if window is not None and window >= self.capacity:
            window = None  # all keys are within it
        return attention(
            q, *self._cache.states(layer), starts=self.positions, blocks=self._blocks,
            scale=scale, mask=mask, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
