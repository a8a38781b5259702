"""Llama-like decoders that rank: a prompt is answered with yes or no, and how surely is its score.

Source: Zhang et al. 2025, "Qwen3 Embedding: Advancing Text Embedding and Reranking Through
Foundation Models": of the token after the prompt,

    score = exp(yes) / (exp(yes) + exp(no)) = sigmoid(yes - no)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from centella.dtypes import DType, f32
from centella.models.llama import LlamaModel
from centella.models.llama_config import LlamaConfig
from centella.models.llama_encoder import in_one_pass
from centella.nn.one_pass import last_states
from centella.tensors.tensor import Tensor


class LlamaRankerConfig(LlamaConfig, frozen=True):
    """A decoder's numbers, and what a classifier has beside them: its one label.

    Attributes:
        labels: the answer whose score is given; type_vocab_size: parts of a pair that it tells
            apart by more than their text.
    """

    labels: ClassVar[tuple[str, ...]] = ("yes",)
    type_vocab_size: ClassVar[int] = 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], origin: str = "config.json") -> Self:
        """The config that a config.json holds.

        Raises:
            WeightsError: as for the decoder; rotary frequencies that depend on a text's length.
        """
        config = super().from_dict(values, origin)
        for turn in config.ropes:
            turn.expect_fixed()
        return config


class LlamaRanker(LlamaModel):
    """The decoder, of which only two logits of the last token count.

    Args:
        config: the numbers; dtype: of the activations.

    Attributes:
        answers: ids of the tokens "yes" and "no".
    """

    config: LlamaRankerConfig
    # Rows of the embedding, which GGUF files have once more.
    ignored: tuple[str, ...] = (*LlamaModel.ignored, "cls.output.*")

    def __init__(self, config: LlamaRankerConfig, dtype: DType = f32) -> None:
        super().__init__(config, dtype)
        self.answers: tuple[int, int] = (0, 0)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]  # no past
        """How much more likely "yes" is than "no".

        Args:
            ids: [batch, seq_len] i32, padded at the end.
            lengths: [batch] i32, tokens of each prompt.

        Returns:
            f32 [batch, 1]: the logit of yes less that of no.

        Raises:
            ShapeError: for ids of another rank, or longer than the model has positions.
            DTypeError: for what is no tensor, or not i32.
        """
        return self._judged(in_one_pass(self, ids, lengths, causal=True), lengths)

    def end_to_end(self, ids: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
        """As `forward` [texts, 1] of prompts that lie end to end, as for `BertModel.end_to_end`."""
        return self._judged(in_one_pass(self, ids, offsets, positions, causal=True), offsets)

    def _judged(self, states: Tensor, lengths: Tensor) -> Tensor:
        yes, no = self.answers
        logits = self.head(last_states(states, lengths))  # [batch, vocab]
        return logits[:, yes : yes + 1] - logits[:, no : no + 1]
