"""`Generator`: prompts to text, in batches, in pieces as they come, and as a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from collections.abc import Generator as Pieces
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Unpack, overload

import numpy as np
from msgspec.structs import replace

from centella.errors import DTypeError, ShapeError, WeightsError
from centella.host.forks import lock_of
from centella.nn.tree import Tree
from centella.tasks.chat import CONFIG, ChatTemplate, check_messages, special_tokens
from centella.tasks.pieces import Generation, Stops, Stream, Text
from centella.tasks.sampling import GeneratorConfig, Sampling, SamplingArgs
from centella.tasks.session import LEAST, Array, Ids, Session
from centella.tensors.arguments import whole
from centella.tensors.tensor import Tensor
from centella.weights.folder import TOKENIZER
from centella.weights.model_files import kind, read_json, show

if TYPE_CHECKING:
    from centella.models.llama import LlamaModel
    from centella.tasks.text import Tokenizer
    from centella.weights.gguf import GGUF

__all__ = ["Generation", "Generator"]
Prompt = str | Sequence[int]
Several = list[str] | list[list[int]] | list[str | list[int]]
ROOM = 256  # capacities are multiples of it
IDLE = 2  # sessions that a Generator keeps
LOST = 32  # tokens that a session forgets for another prompt where a new one could be made


class Generator:
    """A language model that continues prompts; `ct.load` makes it.

    Attributes:
        model: the decoder: `model(ids)` gives logits, and so does calling the Generator.
        config: which tokens end a text.
    """

    def __init__(
        self, model: LlamaModel, tokenizer: Tokenizer | Path, config: GeneratorConfig,
        template: ChatTemplate | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.config = config
        self.template = template
        self._tokenizer = tokenizer  # a Path: the file that the model's folder lacks
        self._idle: list[Session] = []
        self._lock = lock_of(self)
        self._tree = Tree(model)

    def __repr__(self) -> str:
        c = self.model.config
        return (
            f"Generator({c.model_type}, {c.num_hidden_layers} layers of {c.hidden_size}, "
            f"{self.model.device!r})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Generator: expected to stay in its process, got a copy or pickle of it; call ct.load "
            "where it is needed"
        )

    def __call__(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Logits f32 [batch, tokens, vocab] of ids [batch, tokens] i32."""
        return self.model(ids, *args, **kwargs)

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids and back.

        Raises:
            WeightsError: the model's folder has none.
        """
        if isinstance(self._tokenizer, Path):
            raise WeightsError(
                f"{self._tokenizer}: expected a tokenizer, got no such file; give ids in place of "
                f"text"
            )
        return self._tokenizer

    @property
    def _decode(self) -> Callable[[Ids], str] | None:
        if isinstance(self._tokenizer, Path):
            return None
        return partial(self._tokenizer.native.decode, skip_special_tokens=True)

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its continuation."""
        return self.model.config.max_position_embeddings

    @overload
    def generate(
        self, prompts: str, *, max_new_tokens: int = 256, stop: str | Sequence[str] = (),
        ignore_eos: bool = False, n: Literal[1] = 1, **sampling: Unpack[SamplingArgs],
    ) -> Generation: ...  # fmt: skip
    @overload
    def generate(
        self, prompts: Several, *, max_new_tokens: int = 256, stop: str | Sequence[str] = (),
        ignore_eos: bool = False, n: int = 1, **sampling: Unpack[SamplingArgs],
    ) -> list[Generation]: ...  # fmt: skip
    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt] | Array | Tensor, *, max_new_tokens: int = 256,
        stop: str | Sequence[str] = (), ignore_eos: bool = False, n: int = 1,
        **sampling: Unpack[SamplingArgs],
    ) -> Any: ...  # fmt: skip
    def generate(
        self, prompts: Prompt | Sequence[Prompt] | Array | Tensor, *, max_new_tokens: int = 256,
        stop: str | Sequence[str] = (), ignore_eos: bool = False, n: int = 1,
        **sampling: Unpack[SamplingArgs],
    ) -> Any:  # fmt: skip
        """Continue prompts.

        Args:
            prompts: one text or one sequence of ids, or several of them, of any lengths.
            max_new_tokens: most tokens of each continuation.
            stop: strings that end a continuation, and are not part of it; also special tokens.
            ignore_eos: go on after the tokens that end a text.
            n: continuations of each prompt.
            sampling: temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty,
                presence_penalty, seed: see `Sampling`; default: as the model's folder says, else
                the most likely token.

        Returns:
            A `Generation`; a list of them for several prompts, or n > 1: those of the first
            prompt, then those of the second.

        Raises:
            ShapeError: an empty prompt, or one without room for a token after it.
            DTypeError: what is neither text nor ids.
            WeightsError: text, for a model without a tokenizer; an id that it has no vector for.
        """
        several, rows = self._rows("generate", prompts)
        rows = [row for row in rows for _ in range(whole("generate", "n", n, 1))]
        chosen = self.config.sampling.with_("generate", sampling)
        stops = self._stops("generate", max_new_tokens, stop, ignore_eos)
        written = [Text(self._decode, stops) for _ in rows]
        with closing(self._tokens(rows, stops.tokens, chosen)) as steps:
            for tokens in steps:
                for text, token in zip(written, tokens, strict=True):
                    text.add(int(token))
                if all(text.finish for text in written):
                    break
        for text in written:
            text.end("context")
        made = [text.generation(len(row)) for text, row in zip(written, rows, strict=True)]
        return made if several or n > 1 else made[0]

    def stream(
        self, prompt: Prompt | Array | Tensor, *, max_new_tokens: int = 256,
        stop: str | Sequence[str] = (), ignore_eos: bool = False,
        on_token: Callable[[int], object] | None = None, **sampling: Unpack[SamplingArgs],
    ) -> Stream:  # fmt: skip
        """The continuation of one prompt in pieces of whole characters, as they come.

        Args:
            prompt, max_new_tokens, stop, ignore_eos, sampling: as for `generate`.
            on_token: called with each token, also with one that completes no character.

        Raises:
            As `generate`, here, at the call.
        """
        several, rows = self._rows("stream", prompt)
        if several:
            raise ShapeError(
                f"stream: expected one prompt, got {len(rows)}; generate takes several"
            )
        stops = self._stops("stream", max_new_tokens, stop, ignore_eos)
        return self._stream("stream", rows, stops, sampling, on_token)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, max_new_tokens: int = 1024,
        stop: str | Sequence[str] = (), ignore_eos: bool = False,
        on_token: Callable[[int], object] | None = None,
        template: Mapping[str, Any] | None = None, **sampling: Unpack[SamplingArgs],
    ) -> Stream:  # fmt: skip
        """The answer to a conversation, in pieces; what it shares with the last one is not reread.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            max_new_tokens, stop, ignore_eos, on_token, sampling: as for `stream`.
            template: further variables of the model's chat template.

        Raises:
            WeightsError: the model's folder has no chat template, or it fails.
            DTypeError: what are no messages.
        """
        row = self._ids("chat", self.encode_chat(messages, **(template or {})))
        stops = self._stops("chat", max_new_tokens, stop, ignore_eos)
        return self._stream("chat", [row], stops, sampling, on_token)

    def warm(self) -> None:
        """Continue a token: programs are compiled, and memory is allocated."""
        self.generate([0], max_new_tokens=2, ignore_eos=True)

    def encode(self, prompt: Prompt) -> Ids:
        """Token ids of one prompt, a text or ids; raises as `generate`."""
        return self._ids("encode", prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> Ids:
        """Token ids of a conversation, up to where the answer begins; raises as `chat`."""
        check_messages("chat", messages)
        if self.template is None:
            raise WeightsError("chat: expected a model folder with a chat template, got none")
        prompt = self.template.render(messages, **values)
        ids: Ids = self.tokenizer.native.encode(prompt, add_special_tokens=False).ids
        return ids

    # -- prompts ----------------------------------------------------------------------------------

    def _rows(self, op: str, prompts: Any) -> tuple[bool, list[Ids]]:
        """Whether there are several prompts, and the ids of each."""
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
            return False, [self._ids(op, prompts)]
        return True, [self._ids(op, p, f"prompts[{i}]") for i, p in enumerate(prompts)]

    def _ids(self, op: str, prompt: Any, name: str = "prompt") -> Ids:
        vocab = self.model.config.vocab_size
        if isinstance(prompt, str):
            (ids,) = self.tokenizer.encode([prompt])
            begin = self.config.begin_id
            ids = ids or ([] if begin is None else [begin])
            self.tokenizer.check_ids([ids], vocab)
        elif isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes):
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
        wrong = next((i for i in ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise ShapeError(f"{op}: expected ids from 0 to {vocab - 1}, got {wrong}")
        if len(ids) >= self.context:
            raise ShapeError(
                f"{op}: expected a prompt of fewer than {self.context:,} tokens, the context of "
                f"the model, got {len(ids):,}"
            )
        return ids

    def _stops(self, op: str, tokens: Any, stop: Any, ignore_eos: Any) -> Stops:
        if not isinstance(ignore_eos, bool):
            raise DTypeError(f"{op}: ignore_eos: expected True or False, got {show(ignore_eos)}")
        texts = (stop,) if isinstance(stop, str) else stop
        fits = isinstance(texts, Sequence | Set) and not isinstance(texts, bytes)
        if not fits or not all(isinstance(t, str) and t for t in texts):
            raise DTypeError(f"{op}: stop: expected strings that are not empty, got {show(stop)}")
        words: tuple[str, ...] = tuple(texts)
        ids: frozenset[int] = frozenset() if ignore_eos else self.config.stop_ids
        if words:
            added = self.tokenizer.native.get_added_tokens_decoder()
            ids |= {i for i, token in added.items() if token.content in words}
        return Stops(ids, words, whole(op, "max_new_tokens", tokens, 1))

    # -- the loop ---------------------------------------------------------------------------------

    def _tokens(self, rows: list[Ids], most: int, sampling: Sampling) -> Pieces[Array]:
        """Tokens [batch] of step after step, at most `most`, and as long as there is room."""
        longest = max(map(len, rows))
        steps = min(most, self.context - longest)
        session = self._session(rows, longest + steps)
        session.choose_by(sampling, rows)
        session.start(rows)
        try:
            for tokens in session.run(steps):
                session.add(tokens)
                yield tokens
        except GeneratorExit:  # the caller has what it wants
            self._keep(session)
            raise
        self._keep(session)

    def _keep(self, session: Session) -> None:
        with self._lock:
            self._idle = [session, *self._idle][:IDLE]

    def _session(self, rows: list[Ids], tokens: int) -> Session:
        """The idle session of that size that has read most of the rows, or a new one."""
        regime = self._regime(tokens)
        capacity = min(self.context, -(-(tokens + LEAST) // ROOM) * ROOM)
        while self._regime(capacity) != regime:
            capacity -= 1
        with self._lock:
            if self._tree.changed:
                self._idle, self._tree = [], Tree(self.model)
            fits = [
                s for s in reversed(self._idle)
                if s.batch == len(rows) and s.capacity >= capacity
                and self._regime(s.capacity) == regime
            ]  # fmt: skip
            session = max(fits, key=lambda s: s.shared(rows), default=None)
            full = len(self._idle) >= IDLE
            if session is not None and (full or session.lost(rows) <= LOST):
                self._idle.remove(session)
                return session
        return Session(self.model, len(rows), capacity)

    def _regime(self, tokens: int) -> list[int]:
        """What rotary frequencies a text of so many tokens has."""
        return [rope.regime(tokens) for rope in self.model.config.ropes]

    def _stream(
        self, op: str, rows: list[Ids], stops: Stops, values: SamplingArgs,
        on_token: Callable[[int], object] | None,
    ) -> Stream:  # fmt: skip
        self.tokenizer  # noqa: B018  # raises now where there is none
        if on_token is not None and not callable(on_token):
            raise DTypeError(f"{op}: on_token: expected a function, got {show(on_token)}")
        sampling = self.config.sampling.with_(op, values)
        text = Text(self._decode, stops)
        pieces = self._pieces(rows, text, stops, sampling, on_token)
        return Stream(pieces, text, len(rows[0]))

    def _pieces(
        self, rows: list[Ids], text: Text, stops: Stops, sampling: Sampling,
        on_token: Callable[[int], object] | None,
    ) -> Pieces[str]:  # fmt: skip
        with closing(self._tokens(rows, stops.tokens, sampling)) as steps:
            for (token,) in steps:
                piece = text.add(int(token))
                if on_token is not None:
                    on_token(int(token))
                if piece:
                    yield piece
                if text.finish:
                    return
        rest = text.end("context")
        if rest:
            yield rest


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def read_gguf(file: GGUF) -> Callable[[LlamaModel], Generator]:
    """Read what a Generator has beside its model from a GGUF file; as `read_generator`."""
    from centella.tasks import text_gguf

    config = GeneratorConfig(text_gguf.stop_ids(file), text_gguf.begin_id(file))
    tokenizer = text_gguf.read_tokenizer(file) or file.file
    template = text_gguf.read_template(file)
    return partial(Generator, tokenizer=tokenizer, config=config, template=template)


def read_generator(folder: Path, vocab_size: int) -> Callable[[LlamaModel], Generator]:
    """Read what a Generator has beside its model, which the function returned takes.

    Raises:
        WeightsError: a file that is malformed.
        MissingExtraError: the folder has a tokenizer, and its library is not installed.
    """
    from centella.tasks.text import Tokenizer

    config = GeneratorConfig.from_folder(folder)
    file = folder / TOKENIZER
    absent = kind(file) == "nothing at that path"
    tokenizer = file if absent else Tokenizer.from_folder(folder, vocab_size)
    template = None if absent else ChatTemplate.from_folder(folder)
    if isinstance(tokenizer, Tokenizer):
        eos = special_tokens(read_json(folder / CONFIG)).get("eos_token", "")
        found = {i for t, i in tokenizer.native.get_vocab().items() if t == eos and i < vocab_size}
        config = replace(config, stop_ids=config.stop_ids | found)
    return partial(Generator, tokenizer=tokenizer, config=config, template=template)
