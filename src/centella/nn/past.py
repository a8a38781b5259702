"""What a decoder keeps of the tokens before."""

from __future__ import annotations

from typing import Generic, TypeVar

from msgspec import Struct

from centella.nn.block_cache import BlockView
from centella.nn.kv_cache import KVCache
from centella.nn.one_pass import OnePass
from centella.tensors.tensor import Tensor

Tables = tuple[Tensor, Tensor]
Cache = KVCache | BlockView | OnePass
C = TypeVar("C", bound=Cache, covariant=True)


class Past(Struct, Generic[C], frozen=True, eq=False):
    """Keys and values, and the rotary tables.

    Attributes:
        cache: keys and values of each layer, of a sequence a row or in blocks of a pool.
        tables: cos and sin of each rotary embedding, f32 [capacity, rotary / 2].
        still: tables that turn nothing, of layers without rotary embedding.
    """

    cache: C
    tables: tuple[Tables, ...]
    still: Tables
