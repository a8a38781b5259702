"""Texts, and pairs of texts, to labels with scores; documents in the order of a question."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import numpy as np

from centella.dtypes import Array
from centella.errors import DTypeError, ShapeError
from centella.tasks.classify.label_runner import ClassifierConfig, LabelRunner, Read
from centella.tasks.classify.labels import ACTIVATIONS, Label, Ranked, Span, activated
from centella.tasks.classify.pairs import Typed
from centella.tasks.text.batches import Progress, listed
from centella.tensors.arguments import expect_finite, flag, one_of, refuse_names, whole

if TYPE_CHECKING:
    from centella.models.bert_head import LabelModel
    from centella.models.llama_ranker import LlamaRanker
    from centella.tasks.classify.rank_prompt import RankPrompt
    from centella.tasks.text.tokenizer import Encoded, Tokenizer

__all__ = ["Classifier", "ClassifierConfig", "TokenClassifier"]

_OF_PAIRS = {  # what errors call the two texts
    "rank": ("rank: query", "rank: documents[{}]"),
    "predict": ("predict: pairs[{}][0]", "predict: pairs[{}][1]"),
}


class Classifier(LabelRunner):
    """A model that labels texts or pairs of texts; `ct.load` returns it. Threads may share one.

    With one label it is a cross-encoder: `rank` puts documents in order. So does a decoder that
    answers a prompt with yes or no (Qwen3-Reranker); its label is "yes", and it labels no texts.

    Attributes:
        model: the encoder and its head, or the decoder; calling the Classifier calls it: logits.
        config: length limit, activations.
    """

    def __init__(
        self, model: LabelModel | LlamaRanker, tokenizer: Tokenizer | Path,
        config: ClassifierConfig, prompt: RankPrompt | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, tokenizer, config)
        self._prompt = prompt

    def _word(self) -> Read:
        return super()._word() if self._prompt is None else self._judged("rank", ["warm"], ["warm"])

    def classify(
        self, texts: str | Iterable[str], *, top_k: int | None = None, batch_size: int = 32,
        progress: bool | Callable[[int, int], None] = False, **other: Never,
    ) -> list[Any]:  # fmt: skip
        """Labels of texts, the most likely first.

        Args:
            texts: one text, or any number of them.
            top_k: labels of each text; None: all.
            batch_size: most texts in one batch; progress: as for `Embedder.encode`.

        Returns:
            For each text a list of `Label`; of one `str`, that list. Scores are shares of a whole
            (softmax); each by itself (sigmoid) with one label, or where the folder's `problem_type`
            says that a text has several; of a regression, its numbers.

        Raises:
            DTypeError: for what is no text; ShapeError: a top_k or batch_size below 1, a decoder.
            WeightsError: for a token that the model has no vector for.
            ContractError: logits that are not finite.
        """
        refuse_names("classify", other)
        if self._prompt is not None:
            raise ShapeError(
                "classify: expected a model that labels texts, got a decoder that judges pairs: "
                "rank, predict"
            )
        top = len(self.labels) if top_k is None else whole("classify", "top_k", top_k, 1)
        several = listed("classify", texts)
        logits = self._logits(len(several), self._alone(several), batch_size, progress)
        expect_finite("classify", "the logits of text", np.array(logits, np.float32))
        labels = [self._sorted(activated(row, self.config.spread), top) for row in logits]
        return labels[0] if isinstance(texts, str) else labels

    def predict(
        self, pairs: Sequence[str] | Iterable[Sequence[str]], *, batch_size: int = 32,
        activation: str | None = None, instruction: str | None = None,
        progress: bool | Callable[[int, int], None] = False, **other: Never,
    ) -> Any:  # fmt: skip
        """Scores of pairs of texts.

        A pair longer than `config.max_length` is cut at its longer text, with a decoder at its end.

        Args:
            pairs: (first, second) each; or one of them.
            batch_size: most pairs in one batch; progress: as for `Embedder.encode`.
            activation: "identity", "sigmoid" or "softmax" of the logits; default: as the folder
                says, else sigmoid for one label and identity for several. Of a decoder sigmoid is
                the share of "yes" beside "no".
            instruction: of a decoder: what the second text is judged by; default: that it answers a
                search for the first.

        Returns:
            f32 [pairs], or [pairs, labels] of several labels; of one pair a float, or [labels].

        Raises:
            DTypeError: for what is no pair of texts; ShapeError: another activation, an instruction
                for a model that takes none.
            WeightsError: for a token that the model has no vector for.
            ContractError: logits that are not finite.
        """
        refuse_names("predict", other)
        texts = listed("predict", pairs)
        single = bool(texts) and all(isinstance(text, str) for text in texts)
        several = [texts] if single else texts
        for i, pair in enumerate(several):
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise DTypeError(f"predict: pairs[{i}]: expected two texts, got {pair!r:.80}")
        firsts, seconds = [pair[0] for pair in several], [pair[1] for pair in several]
        scores = self._scores(
            "predict", firsts, seconds, batch_size, activation, progress, instruction
        )
        if single:
            return float(scores[0]) if scores.ndim == 1 else scores[0]
        return scores

    def rank(
        self, query: str, documents: Iterable[str], top_k: int | None = None, *,
        instruction: str | None = None, batch_size: int = 32, activation: str | None = None,
        progress: bool | Callable[[int, int], None] = False, **other: Never,
    ) -> list[Ranked]:  # fmt: skip
        """Documents ordered by how well they answer a question, the best first.

        Args:
            query: the question; documents: the texts.
            top_k: how many to give; None: all.
            instruction, batch_size, activation, progress: as for `predict`.

        Raises:
            DTypeError: for what is no text; ShapeError: a model of several labels, a top_k below 1,
                an instruction for a model that takes none.
            WeightsError: for a token that the model has no vector for.
            ContractError: logits that are not finite.
        """
        refuse_names("rank", other)
        if len(self.labels) != 1:
            raise ShapeError(
                f"rank: expected a model of one label, got {len(self.labels)}; predict gives the "
                f"scores of all"
            )
        if not isinstance(query, str):
            raise DTypeError(f"rank: query: expected str, got {type(query).__name__}")
        if isinstance(documents, str):
            raise DTypeError("rank: documents: expected several texts, got str")
        texts = listed("rank", documents)
        top = len(texts) if top_k is None else whole("rank", "top_k", top_k, 1)
        scores = self._scores(
            "rank", [query] * len(texts), texts, batch_size, activation, progress, instruction
        )
        order = np.argsort(-scores, kind="stable")[:top]
        return [Ranked(int(i), float(scores[i]), texts[i]) for i in order]

    def _scores(
        self, op: str, firsts: list[Any], seconds: list[Any], batch_size: int,
        activation: str | None, progress: Progress, instruction: str | None,
    ) -> Array:  # fmt: skip
        wanted = activation or self.config.activation
        one_of(op, "activation", wanted, ACTIVATIONS)
        read = self._judged(op, firsts, seconds, instruction)
        rows = self._logits(len(seconds), read, batch_size, progress, op=op)
        logits = np.array(rows, np.float32).reshape(len(rows), len(self.labels))
        expect_finite(op, "the logits of pair", logits)
        scores = activated(logits, wanted)
        return scores[:, 0] if len(self.labels) == 1 else scores

    def _judged(
        self, op: str, firsts: list[Any], seconds: list[Any], instruction: str | None = None
    ) -> Read:
        """Pairs as the model reads them."""
        most, prompt = self.config.max_length, self._prompt
        names = _OF_PAIRS[op]
        a, b = self._prepared(firsts, names[0]), self._prepared(seconds, names[1])
        if prompt is not None:
            return lambda some: Typed(prompt.tokens(a[some], b[some], instruction, most))
        if instruction is not None:
            raise ShapeError(
                f"{op}: instruction: expected none: this model reads two texts and no prompt"
            )
        return lambda some: self._pairs.pairs(a[some], b[some], most)

    def _sorted(self, scores: Array, top: int) -> list[Label]:
        order = np.argsort(-scores, kind="stable")[:top]
        return [Label(self.labels[i], float(scores[i])) for i in order]


class TokenClassifier(LabelRunner):
    """A model that labels the tokens of texts; `ct.load` makes it. Threads may share one.

    Attributes: as of a `Classifier`.
    """

    def classify(
        self, texts: str | Iterable[str], *, grouped: bool = True, batch_size: int = 32,
        progress: bool | Callable[[int, int], None] = False, **other: Never,
    ) -> list[Any]:  # fmt: skip
        """The labelled parts of texts.

        Args:
            texts: one text, or any number of them.
            grouped: neighbouring tokens of one label are one part, with the mean of their scores;
                "B-" begins another, and tokens of label "O" are left out. False: each token.
            batch_size: most texts in one batch; progress: as for `Embedder.encode`.

        Returns:
            For each text a list of `Span`; of one `str`, that list.

        Raises:
            DTypeError: for what is no text; ShapeError: a batch_size below 1.
            WeightsError: for a token that the model has no vector for.
        """
        refuse_names("classify", other)
        together = flag("classify", "grouped", grouped)
        several = listed("classify", texts)
        encoded = self.tokenizer.encode_whole(self._prepared(several), None, self.config.max_length)
        logits = self._logits(
            len(several), lambda some: Typed.of(encoded[some]), batch_size, progress
        )
        labels = [
            self._spans(text, e, activated(rows, "softmax"), together)
            for text, e, rows in zip(several, encoded, logits, strict=True)
        ]
        return labels[0] if isinstance(texts, str) else labels

    def _spans(self, text: str, encoded: Encoded, scores: Array, grouped: bool) -> list[Span]:
        """Of one text, from scores [tokens, labels]."""
        spans: list[Span] = []
        counts: list[int] = []  # tokens of each span
        last = -1  # the token before, if it is the last of a span
        for i, (start, end) in enumerate(encoded.offsets):
            if encoded.special[i]:
                continue
            best = int(scores[i].argmax())
            label, score = self.labels[best], float(scores[i, best])
            part, bare = label[:2], label[2:] if label[:2] in ("B-", "I-") else label
            if not grouped:
                spans.append(Span(label, score, start, end, text[start:end]))
                continue
            if label == "O":
                continue
            if spans and last == i - 1 and part != "B-" and spans[-1].label == bare:
                one, n = spans.pop(), counts[-1]
                score, start = (one.score * n + score) / (n + 1), one.start
                counts[-1] = n + 1
            else:
                counts.append(1)
            spans.append(Span(bare, score, start, end, text[start:end]))
            last = i
        return spans
