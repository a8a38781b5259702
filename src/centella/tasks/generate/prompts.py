"""What users ask for: prompts to token ids, and arguments to settings, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from centella.dtypes import DType, i8
from centella.errors import DTypeError, ShapeError, WeightsError
from centella.tasks.chat.messages import ChatTemplate, check_messages
from centella.tasks.chat.plain_data import plain_data
from centella.tasks.generate import logprobs as probabilities
from centella.tasks.generate.beam_settings import BeamSettings, refuse_beside_beams
from centella.tasks.generate.pieces import Ids, Stops
from centella.tasks.generate.sampling import GeneratorConfig, Sampling, SamplingArgs
from centella.tasks.text.batches import expect_tokenizer
from centella.tasks.text.check_texts import check_text
from centella.tasks.text.tokens import Tokens
from centella.tensors.arguments import flag, whole
from centella.tensors.tensor import Tensor
from centella.weights.model_files import show

if TYPE_CHECKING:
    from centella.models.llama import LlamaModel
    from centella.tasks.text.tokenizer import Tokenizer

MOST_CONTINUATIONS = 1 << 16  # of one prompt
OWN = frozenset({"answer", "messages", "parse_special"})  # names of chat's, no template variables


class Asked(Struct, frozen=True):
    """How a prompt is to be continued.

    Attributes:
        sampling: how tokens are chosen.
        stops: when a continuation ends.
        logprobs: alternatives whose log-probabilities are wanted; None: none at all.
        draft: who guesses tokens: "lookup", a smaller model, or nobody.
        cache: storage of keys and values; None: that of activations.
        beams: how texts are searched for; None: one token is chosen after the other.
    """

    sampling: Sampling
    stops: Stops
    logprobs: int | None = None
    draft: LlamaModel | str | None = None
    cache: DType | None = None
    beams: BeamSettings | None = None


def cache_dtype(op: str, cache: object) -> DType | None:
    """The storage of keys and values that is asked for.

    Raises:
        DTypeError: neither "i8" nor None.
    """
    if cache is None or cache is i8 or (isinstance(cache, str) and cache == i8.name):
        return None if cache is None else i8
    raise DTypeError(f'{op}: cache: expected "i8" or None, got {show(cache)}')


class Prompts:
    """Reads prompts for a model.

    Args:
        tokenizer: of the model; a Path: the file that its folder lacks.
        vocab: tokens that the model has vectors for.
        context: most tokens of a prompt and its continuation.
        limit: why there are no more: the end of a message.
    """

    def __init__(
        self, tokenizer: Tokenizer | Path, vocab: int, context: int, limit: str = ""
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._context = context
        self._limit = limit

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids and back.

        Raises:
            WeightsError: the model's folder has none.
        """
        return self.tokenizer_for("give ids in place of text")

    def tokenizer_for(self, use: str) -> Tokenizer:
        """`tokenizer`; where there is none, the error says what it is for, or what to do."""
        return expect_tokenizer(self._tokenizer, f"; {use}")

    @property
    def decode(self) -> Callable[[Ids], str] | None:
        """Ids to text without special tokens; None without a tokenizer."""
        if isinstance(self._tokenizer, Path):
            return None
        return self._tokenizer.decode

    def rows(self, op: str, prompts: Any, begin: int | None) -> tuple[bool, list[Ids]]:
        """Whether there are several prompts, and the ids of each.

        Raises:
            DTypeError, ShapeError: what is no prompt; WeightsError: no tokenizer for a text.
        """
        if isinstance(prompts, Tensor):
            prompts = prompts.numpy()
        if isinstance(prompts, np.ndarray):
            prompts = prompts.tolist()
        if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Sequence):
            raise DTypeError(
                f"{op}: expected text, ids, or a list of them, got {type(prompts).__name__}"
            )
        one = isinstance(prompts, str) or not prompts or _whole(prompts[0])
        if one:
            return False, [self.ids(op, prompts, begin)]
        return True, [self.ids(op, p, begin, f"prompts[{i}]") for i, p in enumerate(prompts)]

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], template: ChatTemplate | None,
        values: Mapping[str, Any], parse_special: object,
    ) -> Ids:  # fmt: skip
        """The ids of a conversation, up to where the answer begins; raises as `Generator.chat`."""
        check_messages("chat", messages)
        check_variables("chat: template", values)
        parsed = flag("chat", "parse_special", parse_special)
        if template is None:
            raise WeightsError("chat: expected a model folder with a chat template, got none")
        messages = plain_data("chat: messages", list(messages))
        values = plain_data("chat: template", values)
        mark = ""
        if not parsed:  # a variable that is a text is the caller's own
            names = [name for name, value in values.items() if not isinstance(value, str)]
            marked, mark = self.tokenizer.written.marked(
                [messages, *(values[name] for name in names)]
            )
            messages, values = marked[0], {**values, **dict(zip(names, marked[1:], strict=True))}
        prompt = template.render(messages, **values)
        check_text("chat: messages", prompt)
        if mark:
            return self.tokenizer.written.encode(prompt, mark)
        ids: Ids = self.tokenizer.native.encode(prompt, add_special_tokens=False).ids
        return ids

    def ids(
        self, op: str, prompt: Any, begin: int | None, name: str = "prompt",
        parse_special: object = True,
    ) -> Ids:  # fmt: skip
        """The ids of one prompt; `begin` stands for a text of none. Raises as `rows`."""
        parsed = flag(op, "parse_special", parse_special)
        if isinstance(prompt, str):
            tokenizer = self.tokenizer if parsed else self.tokenizer.plain
            (ids,) = tokenizer.encode([prompt])
            ids = ids or ([] if begin is None else [begin])
            self.tokenizer.check_ids(Tokens.of([ids]), self._vocab)
        elif _is_row(prompt):
            at = next((i for i, v in enumerate(prompt) if not _whole(v)), None)
            if at is not None:
                raise DTypeError(
                    f"{op}: {name}[{at}]: expected a whole number, got {show(prompt[at])}"
                )
            ids = [int(i) for i in prompt]
        else:
            raise DTypeError(
                f"{op}: {name}: expected text or whole numbers, got {type(prompt).__name__}"
            )
        if not ids:
            raise ShapeError(
                f"{op}: {name}: expected a prompt of one token or more, or several prompts, got "
                f"{show(prompt)}"
            )
        wrong = next((i for i in ids if not 0 <= i < self._vocab), None)
        if wrong is not None:
            raise ShapeError(f"{op}: expected ids from 0 to {self._vocab - 1}, got {wrong}")
        if len(ids) >= self._context:
            raise ShapeError(
                f"{op}: expected a prompt of fewer than {self._context:,} tokens, the context of "
                f"the model, got {len(ids):,}{self._limit}"
            )
        return ids

    def asked(
        self, op: str, config: GeneratorConfig, sampling: SamplingArgs, *, tokens: object,
        stop: Any, ignore_eos: object, logprobs: object, draft: LlamaModel | str | None = None,
        cache: object = None, beams: BeamSettings | None = None,
    ) -> Asked:  # fmt: skip
        """Arguments of `op`, checked.

        Raises:
            DTypeError, ShapeError: one that cannot be; TypeError: an unknown name.
        """
        texts = (stop,) if isinstance(stop, str) else stop
        fits = isinstance(texts, Sequence | Set) and not isinstance(texts, bytes)
        if not fits or not all(isinstance(t, str) and t for t in texts):
            raise DTypeError(f"{op}: stop: expected strings that are not empty, got {show(stop)}")
        words: tuple[str, ...] = tuple(texts)
        ids: frozenset[int] = frozenset() if flag(op, "ignore_eos", ignore_eos) else config.stop_ids
        if words:
            tokenizer = self.tokenizer_for(f"{op} finds stop strings in text")
            added = tokenizer.native.get_added_tokens_decoder()
            ids |= {i for i, token in added.items() if token.content in words}
        stops = Stops(ids, words, whole(op, "max_new_tokens", tokens, 1))
        chosen = config.sampling.with_(op, sampling)
        alternatives = probabilities.checked(op, logprobs)
        if beams is not None:
            refuse_beside_beams(op, beams, sampling, draft, len(ids))
        return Asked(chosen, stops, alternatives, draft, cache_dtype(op, cache), beams)


def check_variables(name: str, values: Mapping[str, object]) -> None:
    """Refuse what are no variables of a chat template, or chat's own; `name`: for errors.

    Raises:
        DTypeError: no mapping of names, or one with an argument of chat's.
    """
    if not isinstance(values, Mapping):
        raise DTypeError(f"{name}: expected variables of the template by name, got {show(values)}")
    for key in values:
        if not isinstance(key, str):
            raise DTypeError(f"{name}: expected names of variables, got {show(key)}")
    if own := sorted(OWN & values.keys()):
        raise DTypeError(f"{name}: expected variables of the template, got {own[0]!r}, chat's own")


def continuations(op: str, n: object) -> int:
    """The number of continuations of a prompt, checked.

    Raises:
        ShapeError: below 1, or more than any device has memory for; DTypeError: no whole number.
    """
    number = whole(op, "n", n, 1)
    if number > MOST_CONTINUATIONS:
        raise ShapeError(f"{op}: expected n of 1 to {MOST_CONTINUATIONS:,}, got {number:,}")
    return number


def _is_row(prompt: object) -> bool:
    """Whether it has elements, and is no text."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim > 0
    return isinstance(prompt, Sequence) and not isinstance(prompt, bytes)


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
