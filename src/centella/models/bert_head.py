"""BERT-like encoders with a classifier: of texts, of pairs of texts, or of each token.

Source: the heads of transformers: `ForSequenceClassification`, `ForTokenClassification`.

    of a text   W act(D x_0) + b        x_0: the first token's state, or the mean of all
    of tokens   W x_i + b               in ModernBERT W norm(act(D x_i)) + b
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from msgspec.structs import replace

from centella.dtypes import DType, f32
from centella.errors import WeightsError
from centella.models.bert import BertModel, norm_of
from centella.models.bert_config import BertConfig
from centella.models.config import ACTIVATIONS
from centella.nn import LayerNorm, Linear, Module
from centella.tensors.functional import gather, mean_pool
from centella.tensors.tensor import Tensor
from centella.weights.model_files import show

MOST_LABELS = 100_000
TOKENS = "ForTokenClassification"
PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


class LabelConfig(BertConfig, frozen=True):
    """An encoder's numbers, and those of its classifier.

    Attributes:
        labels: their names.
        of_tokens: whether each token has labels; else a text.
        problem: one of `PROBLEMS`, or "" where the file does not say.
        head_activation: before the labels' product; head_bias: of the product before that.
        head_pooling: "cls" or "mean".
    """

    derived: ClassVar[frozenset[str]] = BertConfig.derived | {
        "labels", "of_tokens", "problem", "head_activation", "head_bias", "head_pooling",
    }  # fmt: skip

    labels: tuple[str, ...] = ()
    of_tokens: bool = False
    problem: str = ""
    head_activation: str = "tanh"
    head_bias: bool = True
    head_pooling: str = "cls"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], origin: str = "config.json") -> Self:
        """The config that a config.json holds.

        Raises:
            WeightsError: as for the encoder; labels that are no list of names.
        """
        config = super().from_dict(values, origin)
        named, usual = values.get("classifier_activation"), config.traits.head[2]
        activation = ACTIVATIONS.get(named, "") if isinstance(named, str) else usual
        pooling, problem = values.get("classifier_pooling", "cls"), values.get("problem_type")
        for name, value, known in (
            ("classifier_activation", activation, set(ACTIVATIONS.values())),
            ("classifier_pooling", pooling, ("cls", "mean")),
            ("problem_type", problem, (None, *PROBLEMS)),
        ):
            if value not in known:
                wanted = ", ".join(map(str, known))
                raise WeightsError(f"{origin}: {name}: expected {wanted}, got {show(values[name])}")
        modern, listed = config.traits.norm_first, values.get("architectures")
        architecture = str(listed[0]) if isinstance(listed, list) and listed else ""
        return replace(
            config, labels=_labels(values, origin), problem=problem or "",
            of_tokens=architecture.endswith(TOKENS),
            head_activation=activation if modern else usual,
            head_bias=bool(values.get("classifier_bias", False)) if modern else True,
            head_pooling=pooling if modern else "cls",
        )  # fmt: skip


def _labels(values: Mapping[str, Any], origin: str) -> tuple[str, ...]:
    """Names of the labels, from `id2label`; without it as many as `num_labels`, or two."""
    named, count = values.get("id2label"), values.get("num_labels", 2)
    if named is None:
        if type(count) is not int or not 0 < count <= MOST_LABELS:
            raise WeightsError(
                f"{origin}: num_labels: expected 1 to {MOST_LABELS}, got {show(count)}"
            )
        return tuple(f"LABEL_{i}" for i in range(count))
    fits = isinstance(named, dict) and 0 < len(named) <= MOST_LABELS
    names = [named.get(str(i)) for i in range(len(named))] if fits else []
    if not fits or not all(isinstance(name, str) for name in names):
        raise WeightsError(f"{origin}: id2label: expected names by 0, 1, ..., got {show(named)}")
    return tuple(map(str, names))


class Head(Module):
    """States of a text to a number for each label."""

    def __init__(self, config: LabelConfig) -> None:
        self.config = config
        width, modern = config.hidden_size, config.traits.norm_first
        self.dense: Linear | None = None
        if modern or not config.of_tokens:
            self.dense = Linear(width, width, config.head_bias)
        self.norm: LayerNorm | None = norm_of(config) if modern else None
        self.out: Linear = Linear(width, len(config.labels))

    def forward(self, states: Tensor, lengths: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to f32 [batch, labels], or [batch, seq_len, labels].

        Of texts end to end: states [tokens, hidden], with offsets in place of lengths.
        """
        c, x = self.config, states
        if not c.of_tokens:
            if c.head_pooling == "mean":
                x = mean_pool(x, lengths)
            else:
                x = x[:, 0] if x.ndim == 3 else gather(x, lengths[:-1])
        if self.dense is not None:
            x = self.dense(x, activation=c.head_activation)
        if self.norm is not None:
            x = self.norm(x)
        return self.out(x).astype(f32)


class LabelModel(Module):
    """The encoder and its classifier: token ids to a number for each label.

    Args:
        config: the numbers; dtype: of the activations.
    """

    ignored: tuple[str, ...] = tuple(f"bert.{pattern}" for pattern in BertModel.ignored)

    def __init__(self, config: LabelConfig, dtype: DType = f32) -> None:
        self.config = config
        self.bert: BertModel = BertModel(config, dtype)
        self.head: Head = Head(config)

    def rename(self, name: str) -> str:
        """Tensors of the encoder and of the classifier, in whatever words of a family."""
        traits = self.config.traits
        dense, out = ("", "classifier") if self.config.of_tokens else traits.head[:2]
        if traits.norm_first:
            dense = traits.head[0]
        bare = traits.bare(name)
        for theirs, ours in ((dense, "head.dense"), (out, "head.out"), ("head.norm", "head.norm")):
            if theirs and bare.startswith(f"{theirs}."):
                return f"{ours}.{bare.removeprefix(f'{theirs}.')}"
        return f"bert.{self.bert.rename(name)}"

    def forward(self, ids: Tensor, lengths: Tensor, types: Tensor | None = None) -> Tensor:
        """Logits.

        Args:
            ids, lengths, types: as `BertModel` takes them.

        Returns:
            f32 [batch, labels]; of tokens [batch, seq_len, labels].

        Raises:
            ShapeError, DTypeError: as `BertModel`.
        """
        return self.head(self.bert(ids, lengths, types), lengths)

    def end_to_end(
        self, ids: Tensor, offsets: Tensor, positions: Tensor, types: Tensor | None = None
    ) -> Tensor:
        """Logits of texts that lie end to end, without padding between them.

        Args:
            ids, offsets, positions, types: as `BertModel.end_to_end` takes them.

        Returns:
            f32 [texts, labels]; of tokens [tokens, labels].

        Raises:
            ShapeError, DTypeError: as `BertModel.end_to_end`.
        """
        return self.head(self.bert.end_to_end(ids, offsets, positions, types), offsets)
