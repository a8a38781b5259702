"""Llama-like decoders that embed: all tokens of a text in one pass, nothing kept.

Source: Zhang et al. 2025, "Qwen3 Embedding" (causal, the last token's state); Schechter Vera et al.
2025, "EmbeddingGemma" (every token sees all, a window on both sides in most layers).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from msgspec.structs import replace

from centella.dtypes import DType, f32
from centella.errors import ShapeError, WeightsError
from centella.models.llama import LlamaModel
from centella.models.llama_config import LlamaConfig
from centella.nn.one_pass import OnePass
from centella.nn.past import Past
from centella.tensors.arguments import check_tensors
from centella.tensors.tensor import Tensor
from centella.weights.model_files import show

BOTH_WAYS = "use_bidirectional_attention"


class LlamaEncoderConfig(LlamaConfig, frozen=True):
    """A decoder's numbers; `both_ways`: every token sees all, else those before it."""

    both_ways: bool = False

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


class LlamaEncoder(LlamaModel):
    """The decoder without its head: token ids to a state for each token.

    Args:
        config: the numbers; dtype: of the activations.
    """

    config: LlamaEncoderConfig

    def __init__(self, config: LlamaEncoderConfig, dtype: DType = f32) -> None:
        super().__init__(config, dtype)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]  # states
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
        return self.norm(in_one_pass(self, ids, lengths, causal=not self.config.both_ways))

    def end_to_end(self, ids: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
        """The last hidden states of texts that lie end to end, as `BertModel.end_to_end`."""
        causal = not self.config.both_ways
        return self.norm(in_one_pass(self, ids, offsets, positions, causal=causal))


def in_one_pass(
    model: LlamaModel, ids: Tensor, lengths: Tensor, positions: Tensor | None = None, *,
    causal: bool,
) -> Tensor:  # fmt: skip
    """Ids [batch, seq_len] of texts of those lengths to the states of the last layer.

    Args:
        positions: None; of texts end to end [tokens] i32, of each token in its text: then ids are
            [tokens], `lengths` are offsets [texts + 1], and the states [tokens, hidden].

    Raises:
        ShapeError, DTypeError: as `LlamaEncoder.forward`.
    """
    name, c = type(model).__name__, model.config
    most = c.max_position_embeddings
    check_tensors(name, ids, lengths)
    if positions is None:
        if ids.ndim != 2 or ids.shape[1] > most:
            raise ShapeError(f"{name}: expected ids [batch, up to {most}], got {list(ids.shape)}")
    else:
        check_tensors(name, positions)
        if ids.ndim != 1 or positions.shape != ids.shape:
            raise ShapeError(
                f"{name}: expected ids and positions [tokens], got {list(ids.shape)} and "
                f"{list(positions.shape)}"
            )
        ids, positions = ids[None], positions[None]
    cache = OnePass(c.num_key_value_heads, c.head_dim, lengths, positions, causal=causal)
    # Tables of this length belong to the capture that reads them.
    tables = model.rotary(min(ids.shape[1], most), ids.device)
    states = model.states(ids, Past(cache, *tables))
    return states if positions is None else states[0]
