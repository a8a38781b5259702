"""Llama-like decoders that embed: all tokens of a text in one pass, nothing kept.

Source: Zhang et al. 2025, "Qwen3 Embedding" (causal, the last token's state); Schechter Vera et al.
2025, "EmbeddingGemma" (every token sees all, a window on both sides in most layers).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, cast

import numpy as np
from msgspec.structs import replace

from centella.dtypes import DType, f32
from centella.errors import ShapeError, WeightsError
from centella.models.llama import LlamaModel, Past, Tables
from centella.models.llama_config import LlamaConfig
from centella.nn import Module
from centella.nn.attention import split_heads
from centella.nn.kv_cache import KVCache
from centella.runtime.device import Device
from centella.tensors.arguments import check_tensors
from centella.tensors.creation import asarray
from centella.tensors.functional import attention, rms_norm, rope
from centella.tensors.tensor import Tensor
from centella.weights.model_files import show

BOTH_WAYS = "use_bidirectional_attention"


class LlamaEncoderConfig(LlamaConfig, frozen=True):
    """A decoder's numbers; `both_ways`: every token sees all, else those before it."""

    both_ways: bool = False

    @property
    def positions(self) -> int:
        """Tokens of the longest text."""
        return self.max_position_embeddings

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], origin: str = "config.json") -> Self:
        """The config that a config.json holds.

        Raises:
            WeightsError: as for the decoder; rotary frequencies that depend on a text's length.
        """
        both = values.get(BOTH_WAYS) or False
        if both not in (True, False):
            raise WeightsError(f"{origin}: {BOTH_WAYS}: expected true or false, got {show(both)}")
        rest = {name: value for name, value in values.items() if name != BOTH_WAYS}
        config = super().from_dict({**rest, "tie_word_embeddings": True}, origin)  # no head
        for turn in config.ropes:
            turn.expect_fixed()
        windows = tuple(w // 2 + 1 if both and w else w for w in config.windows)
        return replace(config, both_ways=bool(both), windows=windows)


class Once:
    """What a decoder's layers ask of a `KVCache`, for a pass over whole texts.

    Args:
        lengths: [batch] i32, tokens of each text.
    """

    def __init__(self, config: LlamaEncoderConfig, lengths: Tensor) -> None:
        self._config = config
        self._lengths = lengths
        self._states: tuple[Tensor, Tensor] | None = None  # keys and values of a layer

    def begin(self, tokens: int) -> None:
        """Nothing to make ready."""

    def append_qkv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, layer: int = 0, *,
        qk_norm: Tensor | None = None, eps: float = 1e-6,
    ) -> Tensor:  # fmt: skip
        """Queries [batch, heads, tokens, head_dim] of a product, turned; as `KVCache` has it."""
        heads, kv = self._config.num_attention_heads, self._config.num_key_value_heads
        x = split_heads(qkv, heads + 2 * kv)
        q, k, v = x[:, :heads], x[:, heads : heads + kv], x[:, heads + kv :]
        if qk_norm is not None:
            q, k = rms_norm(q, qk_norm[0], eps), rms_norm(k, qk_norm[1], eps)
        self._states = rope(k, cos, sin), v
        return rope(q, cos, sin)

    def attend(
        self, q: Tensor, layer: int = 0, *, scale: float | None = None, window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention over the layer's tokens: [batch, heads, tokens, head_dim]."""
        assert self._states is not None, "a layer appends before it attends"
        return attention(
            q, *self._states, lengths=self._lengths, causal=not self._config.both_ways,
            scale=scale, window=window, softcap=softcap,
        )  # fmt: skip


class LlamaEncoder(Module):
    """The decoder without its head: token ids to a state for each token.

    Args:
        config: the numbers; dtype: of the activations.
    """

    ignored: tuple[str, ...] = ("decoder.lm_head.weight", "decoder.*.rotary_emb.inv_freq")

    def __init__(self, config: LlamaEncoderConfig, dtype: DType = f32) -> None:
        self.config = config
        self.decoder: LlamaModel = LlamaModel(config, dtype)

    def rename(self, name: str) -> str:
        """The decoder's names; the whole keeps its own."""
        return f"decoder.{self.decoder.rename(name)}" if name else name

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """The last hidden states, normalised.

        Args:
            ids: [batch, seq_len] i32, padded at the end.
            lengths: [batch] i32, tokens of each text; the states of padding mean nothing.

        Returns:
            [batch, seq_len, hidden].

        Raises:
            ShapeError: for ids of another rank, or longer than the model has positions.
            DTypeError: for what is no tensor, or not i32.
        """
        check_tensors("LlamaEncoder", ids, lengths)
        longest = self.config.positions
        if ids.ndim != 2 or ids.shape[1] > longest:
            raise ShapeError(
                f"LlamaEncoder: expected ids [batch, up to {longest}], got {list(ids.shape)}"
            )
        *tables, still = self.tables(ids.shape[1], ids.device)
        once = cast(KVCache, Once(self.config, lengths))  # which has all that layers ask for
        x = self.decoder.states(ids, Past(once, tuple(tables), still))
        return rms_norm(x, self.decoder.norm.scale, self.config.rms_norm_eps)

    def tables(self, seq_len: int, device: Device) -> list[Tables]:
        """Cos and sin of each rotary embedding, and those that turn nothing; captures keep them."""
        made = [turn.tables(seq_len) for turn in self.config.ropes]
        still = np.ones((seq_len, 1), np.float32), np.zeros((seq_len, 1), np.float32)
        return [
            (asarray(cos, device=device), asarray(sin, device=device))
            for cos, sin in [*made, still]
        ]
