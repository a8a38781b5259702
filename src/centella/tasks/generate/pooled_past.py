"""A decoder's keys and values in blocks of one pool, and what reads prompts into them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from centella.dtypes import DType
from centella.nn.block_cache import BlockCache, BlockView
from centella.nn.block_table import BLOCK, BlockTable
from centella.nn.past import Past, Tables
from centella.tasks.generate.session import CHUNK, Ids, next_part
from centella.tensors.jit import Jitted, method_of
from centella.tensors.tensor import Tensor

if TYPE_CHECKING:
    from centella.models.llama import LlamaModel

NARROWEST = 4  # blocks of a table: fewer make no other capture
CAPTURES = 64  # of each kind of step that are kept


class PooledPast:
    """Keys and values of sequences that come and go.

    Args:
        model: the decoder.
        blocks: of the pool.
        context: most tokens of a sequence.
        cache: storage of keys and values.

    Attributes:
        model, context: the same; cache: the pool.
    """

    def __init__(self, model: LlamaModel, blocks: int, context: int, cache: DType) -> None:
        config, device = model.config, model.device
        self.model: LlamaModel = model
        self.context: int = context
        self.cache: BlockCache = BlockCache(
            config.num_key_value_heads, config.head_dim, blocks,
            num_layers=config.num_hidden_layers, dtype=cache, device=device,
        )  # fmt: skip
        self._widest = -(-context // BLOCK)
        self._rotary: dict[int, tuple[tuple[Tables, ...], Tables]] = {}  # by the kind of a table
        while (length := max(self._rotary, default=0) + 1) <= context:
            self._rotary[self.kind(length)] = model.rotary(context, device, length)
        self._read: Jitted[..., None] = Jitted(method_of(self._reading), device, CAPTURES)

    def forget(self) -> None:
        """Captures and contents of another model: its parameters were changed."""
        self._read.clear()
        self.cache.blocks.forget_all()

    def kind(self, length: int) -> int:
        """Of the table of a text: how many tokens the longest has that turns as it does."""
        return self.model.config.reach(length)

    def view(self, table: Tensor, kind: int) -> Past[BlockView]:
        """The past of sequences of one kind: `BlockCache.rows` says what is in a table."""
        return Past(self.cache.view(table), *self._rotary[kind])

    def width(self, blocks: int) -> int:
        """Columns of a table with room for so many blocks: one of a few numbers."""
        return max(NARROWEST, min(1 << (blocks - 1).bit_length(), max(self._widest, blocks)))

    def read(self, left: Ids, table: BlockTable) -> int:
        """Submit the reading of the next part of a prompt; how many tokens it has.

        Args:
            left: what is still to be read; table: of the sequence, which has places for all of it.
        """
        padded = next_part(len(left), CHUNK, CHUNK)
        part = np.zeros((1, padded), np.int32)
        count = min(len(left), padded)
        part[0, :count] = left[:count]
        width = self.width(max(len(table.blocks), -(-padded // BLOCK)))
        self._read(part, self.cache.rows([(len(table.tokens), table)], 1, width), table.kind)
        table.add(left[:count])
        return count

    def _reading(self, ids: Tensor, table: Tensor, kind: int) -> None:
        self.model.states(ids, self.view(table, kind))
