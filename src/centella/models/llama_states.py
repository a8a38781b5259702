"""A decoder without its head, as embedders have it: ids to the state of each token.

Queries see the keys of the tokens before them, all of which are there: no cache is kept. Padding
follows a text, whose tokens see none of it, so a text has the same states in every batch.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from centella.dtypes import DType, f32
from centella.errors import ShapeError
from centella.models.llama import LlamaModel, Tables
from centella.models.llama_config import LlamaConfig
from centella.runtime.device import Device
from centella.tensors.arguments import check_tensors
from centella.tensors.creation import asarray, full
from centella.tensors.functional import attention, rms_norm, rope
from centella.tensors.tensor import Tensor

__all__ = ["LlamaConfig", "LlamaStates"]

LEAST = 64  # positions of rotary tables, of which there are those of few capacities


class OnePass:
    """Keys and values of one pass through the layers, in the place of a `KVCache`.

    Args:
        kv_heads: heads of keys; head_dim: columns of each.
    """

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        self._kv_heads, self._head_dim = kv_heads, head_dim
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, tokens: int) -> None:
        """Nothing is to be done."""

    def append_qkv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, layer: int = 0, *,
        qk_norm: Tensor | None = None, eps: float = 1e-6,
    ) -> Tensor:  # fmt: skip
        """As `KVCache.append_qkv`."""
        kv, dim = self._kv_heads, self._head_dim
        x = qkv.reshape(*qkv.shape[:2], qkv.shape[2] // dim, dim).permute(0, 2, 1, 3)
        q, k, v = x[:, : -2 * kv], x[:, -2 * kv : -kv], x[:, -kv:]
        if qk_norm is not None:
            q, k = rms_norm(q, qk_norm[0], eps), rms_norm(k, qk_norm[1], eps)
        self._layers[layer] = rope(k, cos, sin), v
        return rope(q, cos, sin)

    def attend(
        self, q: Tensor, layer: int = 0, *, scale: float | None = None, window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """As `KVCache.attend`; the layer's keys and values are let go."""
        k, v = self._layers.pop(layer)
        return attention(q, k, v, causal=True, scale=scale, window=window, softcap=softcap)


class Passing(Struct, frozen=True, eq=False):
    """What layers are given in the place of a past: as `Past`."""

    cache: OnePass
    tables: tuple[Tables, ...]
    still: Tables


class LlamaStates(LlamaModel):
    """Token ids to normalised states; a checkpoint's head is ignored."""

    def __init__(self, config: LlamaConfig, dtype: DType = f32) -> None:
        super().__init__(replace(config, tie_word_embeddings=True), dtype)
        self._turns: dict[tuple[Device, int], tuple[Tables, ...]] = {}

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]  # states
        """ids [batch, seq_len] i32, lengths [batch] i32 to states [batch, seq_len, hidden].

        Raises:
            ShapeError: ids of another rank, or longer than the model has positions.
        """
        check_tensors("LlamaStates", ids, lengths)
        most = self.config.positions
        if ids.ndim != 2 or ids.shape[1] > most:
            raise ShapeError(
                f"LlamaStates: expected ids [batch, up to {most}], got {list(ids.shape)}"
            )
        c = self.config
        *turns, still = self.turns(ids.shape[1], ids.device)
        cache = OnePass(c.num_key_value_heads, c.head_dim)
        return self.norm(self.states(ids, Passing(cache, tuple(turns), still)))

    def turns(self, seq_len: int, device: Device) -> tuple[Tables, ...]:
        """The rotary tables, and those that turn nothing, sent to a device once."""
        capacity = min(max(1 << (seq_len - 1).bit_length(), LEAST), self.config.positions)
        key = device, capacity
        if key not in self._turns:
            made = [turn.tables(capacity) for turn in self.config.ropes]
            sent = [(asarray(cos, device=device), asarray(sin, device=device)) for cos, sin in made]
            ones = full((capacity, 1), 1.0, device=device)
            self._turns[key] = (*sent, (ones, full((capacity, 1), 0.0, device=device)))
        return self._turns[key]
