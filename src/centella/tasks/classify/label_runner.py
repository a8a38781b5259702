"""Encoded texts to logits: what classifiers of texts, pairs and tokens share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from msgspec import Struct

from centella.dtypes import Array
from centella.nn.tree import Tree
from centella.runtime.pending import Pending
from centella.tasks.classify.pairs import Pairs, Typed
from centella.tasks.embed.forward import CAPTURES, room_of
from centella.tasks.embed.replicas import Replicas
from centella.tasks.text.batches import (
    Batch,
    Progress,
    batches_of,
    expect_tokenizer,
    portions,
    progress_of,
    run_batches,
    threads_ahead,
)
from centella.tasks.text.check_texts import checked_texts
from centella.tasks.text.tokens import Tokens
from centella.tensors.arguments import check_called, whole
from centella.tensors.hints import Hinted
from centella.tensors.jit import Jitted
from centella.tensors.tensor import Tensor

if TYPE_CHECKING:
    from centella.models.bert_head import LabelModel
    from centella.models.llama_ranker import LlamaRanker
    from centella.tasks.text.tokenizer import Tokenizer

Read = Callable[[slice], Typed]  # of some of the texts
Types = dict[int, Array]  # parts of pairs, by text


class ClassifierConfig(Struct, frozen=True):
    """How texts are read, and logits become scores.

    Attributes:
        max_length: tokens that a text or a pair is cut at, special ones counted.
        activation: of `predict` and `rank`: "identity", "sigmoid" or "softmax".
        spread: of `classify`.
        lower_case: whether texts are lower-cased before they are tokenised.
    """

    max_length: int
    activation: str
    spread: str
    lower_case: bool = False


class LabelRunner(Hinted):
    """Encoded texts to logits, in batches, captured for each size of batch."""

    def __init__(
        self, model: LabelModel | LlamaRanker, tokenizer: Tokenizer | Path,
        config: ClassifierConfig,
    ) -> None:  # fmt: skip
        if not isinstance(tokenizer, Path):
            tokenizer.check_pad_id(model.config.vocab_size)
        self.model = model
        self._tokenizer = tokenizer  # a Path: the file that the model's folder lacks
        self.config = config
        self.replicas = ()
        self._capture()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The model's logits: `classifier(ids, lengths)`."""
        check_called(type(self).__name__, args, "model.classify(texts) labels texts")
        return self.model(*args, **kwargs)

    def __repr__(self) -> str:
        devices = ", ".join(repr(each.model.device) for each in (self, *self.replicas))
        count = len(self.labels)
        return f"{type(self).__name__}({count} label{'s' * (count != 1)}, {devices})"

    @property
    def replicas(self) -> tuple[Self, ...]:
        """The copies of the model on further devices, which share the batches of each call.

        They use this `config`. If you change `model`, change that of each replica too, then set
        `replicas` again.
        """
        return self._replicas.others

    @replicas.setter
    def replicas(self, replicas: tuple[Self, ...]) -> None:
        self._replicas: Replicas[Any] = Replicas("classify", self, replicas)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels."""
        return self.model.config.labels

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids.

        Raises:
            WeightsError: the model's folder has none.
        """
        return expect_tokenizer(self._tokenizer)

    def warm(self) -> None:
        """Run a text of one word on each device: programs are compiled, memory is allocated.

        A device that fails is named in the log, and the others go on.

        Raises:
            CentellaError: no device is left.
        """
        self._logits(1, self._word(), 1, False, each=True)

    def _word(self) -> Read:
        """What `warm` runs."""
        return self._alone(["warm"])

    def _capture(self) -> None:
        model: Any = self.model

        def logits(ids: Tensor, lengths: Tensor, *more: Tensor) -> Tensor:
            result: Tensor = (model if ids.ndim == 2 else model.end_to_end)(ids, lengths, *more)
            return result

        self._tree, self._room = Tree(model), room_of(model)
        self._captured: Jitted[..., Tensor] = Jitted(logits, model.device, CAPTURES)

    @cached_property
    def _pairs(self) -> Pairs:
        return Pairs(self.tokenizer)

    def _prepared(self, texts: Sequence[Any], name: str = "classify: texts[{}]") -> list[str]:
        checked = checked_texts(texts, name)
        return [text.lower() for text in checked] if self.config.lower_case else checked

    def _alone(self, texts: Sequence[Any]) -> Read:
        """Texts as the model reads them."""
        read = self._prepared(texts)
        return lambda some: self._pairs.alone(read[some], self.config.max_length)

    def _logits(
        self, count: int, read: Read, batch_size: int, progress: Progress, each: bool = False,
        op: str = "classify",
    ) -> list[Array]:  # fmt: skip
        """Of so many texts: of each [labels], or [tokens, labels].

        Args:
            op: who asks, for errors.
            each: whether every device runs them, of which there is one.
        """
        batch_size = whole(op, "batch_size", batch_size, 1)
        progress = progress_of(op, progress)
        logits: list[Array] = [np.empty(0, np.float32)] * count
        types: Types = {}
        config, most, pad = self.model.config, self.config.max_length, self.tokenizer.pad_id or 0

        def tokenized(some: slice) -> Tokens:
            typed = read(some)
            self.tokenizer.check_ids(typed.tokens, config.vocab_size)
            if typed.types is not None and config.type_vocab_size > 1:
                for i in range(len(typed.types)):
                    types[some.start + i] = typed.types.array(i)
            return typed.tokens

        def submit(where: Self, batch: Batch) -> Pending[Array]:
            return where._submit(batch, types, batch_size, pad)

        def take(batch: Batch, result: Array) -> None:
            lengths = batch.tokens.lengths[batch.rows]
            rows = np.split(result, lengths.cumsum()) if of_tokens and result.ndim == 2 else result
            for i, row, length in zip(batch.texts, rows, lengths, strict=False):
                logits[i] = row[:length] if of_tokens else row

        of_tokens = getattr(config, "of_tokens", False)
        parts = [partial(tokenized, some) for some in portions(count)]
        threads = threads_ahead(where.model.device for where in (self, *self.replicas))
        batches = batches_of(parts, batch_size, most, 0, threads)
        if not self.replicas or not count:
            run_batches(batches, count, partial(submit, self), take, progress)
        elif each:
            self._replicas.run_on_each(self, next(batches), submit)
        else:
            few = count <= batch_size
            self._replicas.run(self, batches, count, submit, take, progress, few)
        return logits

    def _submit(self, batch: Batch, types: Types, size: int, fill: int) -> Pending[Array]:
        """Start a batch of at most `size` texts: end to end where that is fewer tokens."""
        if self._tree.changed:
            self._capture()
        most = self.config.max_length
        packs = batch.packs(size, most, self._room)
        ids, at, *positions = (
            batch.end_to_end(size, fill) if packs else batch.grid(size, most, fill)
        )
        second = np.zeros_like(ids)
        targets = [second[start:] for start in at] if packs else second
        for target, text in zip(targets, batch.texts.tolist(), strict=False):
            if (row := types.get(text)) is not None:
                target[: len(row)] = row
        return self._captured.fetch(ids, at, *positions, *([second] if second.any() else []))
