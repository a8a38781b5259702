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
from centella.errors import ShapeError
from centella.nn.block_table import BLOCK, Blocks, BlockTable
from centella.nn.cache_layer import CacheLayer, check_storage, planes_of
from centella.nn.room import check_cache
from centella.runtime.device import Device, current_device
from centella.runtime.device import device as open_device
from centella.tensors.arguments import check_tensors, whole
from centella.tensors.jit import Jitted, method_of
from centella.tensors.tensor import Tensor

Array = np.ndarray[Any, Any]


class BlockCache:
    """Keys and values in blocks of 64 tokens, which any number of sequences share.

    Args:
        num_kv_heads, head_dim: heads of keys and values, and their size.
        blocks: of the pool; one more is there for what nobody needs.
        num_layers: layers, which all have the same blocks.
        dtype: storage of keys and values, a float or i8, as a `KVCache` has it.

    Attributes:
        blocks: which of them are free: the host's side.

    Raises:
        ShapeError: a size below 1.
        DTypeError: a dtype that is neither a float nor i8.
        OutOfMemoryError: the device has no room for the pool; says how much is needed, and what is
            free. LimitError: a State of it is larger than a buffer may be.
    """

    def __init__(
        self, num_kv_heads: int, head_dim: int, blocks: int, *, num_layers: int = 1,
        dtype: Any = f32, device: str | Device | None = None,
    ) -> None:  # fmt: skip
        sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "blocks": blocks,
                 "num_layers": num_layers}  # fmt: skip
        for name, value in sizes.items():
            whole("BlockCache", name, value, 1)
        self.dtype: DType = dtype_of(dtype)
        check_storage("BlockCache", self.dtype)
        self.shape: tuple[int, int, int, int] = (num_kv_heads, blocks + 1, BLOCK, head_dim)
        self.device: Device = current_device() if device is None else open_device(device)
        fewer = f"fewer tokens ({blocks * BLOCK:,}) for all sequences together"
        planes = planes_of(self.shape, self.dtype).values()
        check_cache("BlockCache", planes, num_layers, self.device, fewer)
        self.blocks: Blocks = Blocks(blocks + 1)
        self._layers = [
            CacheLayer(self.shape, self.dtype, self.device, "BlockCache", i)
            for i in range(num_layers)
        ]
        self._copy: Jitted[..., None] = Jitted(method_of(self.copied), self.device)
        self.reset()

    def __repr__(self) -> str:
        return (
            f"<BlockCache {list(self.shape)} {self.dtype.name}, {len(self._layers)} layers, "
            f"{self.blocks.free} blocks free on {self.device.name}>"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def num_layers(self) -> int:
        """Layers of the model, each with keys and values of its own."""
        return len(self._layers)

    def reset(self) -> None:
        """Zeros everywhere; in the block of nobody they stay, for padding to read."""
        for layer in self._layers:
            layer.reset()

    def sequence(self, kind: int = 0) -> BlockTable:
        """An empty sequence, which takes its blocks from this pool; its kind shares them."""
        return BlockTable(self.blocks, kind)

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """The pools of a layer, [num_kv_heads, blocks + 1, 64, head_dim] each; scales end in 2."""
        return self._layers[layer].stored

    def layer(self, number: int) -> CacheLayer:
        """Where a layer is, to be written and read by a step."""
        return self._layers[number]

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
        if not pairs:
            return
        copies = np.zeros((1 << (len(pairs) - 1).bit_length(), 3), np.int32)  # few captures
        copies[: len(pairs)] = [(source, target, BLOCK) for source, target in pairs]
        self._copy(copies)

    def copied(self, copies: Tensor) -> None:
        """Copy blocks as a part of what is captured: the op `cache_copy`.

        Args:
            copies: i32 [rows, 3]: from, to, keys.
        """
        for layer in self._layers:
            layer.copy(copies)


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

    def append_qkv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, layer: int = 0, *,
        qk_norm: Tensor | None = None, eps: float = 1e-6, interleaved: bool = False,
    ) -> Tensor:  # fmt: skip
        """As `KVCache.append_qkv`."""
        return self._cache.layer(layer).write_qkv(
            self._by_head(qkv), self.shape[1], cos, sin, self._table, qk_norm=qk_norm, eps=eps,
            interleaved=interleaved,
        )  # fmt: skip

    def attend_qkv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, layer: int = 0, *,
        qk_norm: Tensor | None = None, eps: float = 1e-6, interleaved: bool = False,
        scale: float | None = None, window: int | None = None, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """As `KVCache.attend_qkv`."""
        if window is not None and window >= self.capacity:
            window = None  # all keys are within it
        return self._cache.layer(layer).attend_qkv(
            self._by_head(qkv), self.shape[1], cos, sin, self._table, qk_norm=qk_norm, eps=eps,
            interleaved=interleaved, scale=scale, window=window, softcap=softcap,
        )  # fmt: skip

    def _by_head(self, qkv: Tensor) -> Tensor:
        """A product of q, k and v as [batch, heads + 2 num_kv_heads, tokens, head_dim]."""
        batch, tokens, width = qkv.shape
        dim = self.shape[3]
        return qkv.reshape(batch, tokens, width // dim, dim).permute(0, 2, 1, 3)

    def attend(
        self, q: Tensor, layer: int = 0, *, scale: float | None = None,
        mask: Tensor | None = None, window: int | None = None, softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As `KVCache.attend`."""
        if window is not None and window >= self.capacity:
            window = None  # all keys are within it
        return self._cache.layer(layer).attend(
            q, starts=self.positions, blocks=self._blocks, scale=scale, mask=mask, window=window,
            softcap=softcap, sinks=sinks,
        )  # fmt: skip
