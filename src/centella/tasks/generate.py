"""`Generator`: prompts to text, in batches, in pieces as they come, and as a chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from msgspec import Struct

from centella.errors import DTypeError, ShapeError, WeightsError
from centella.host.forks import lock_of
from centella.nn.tree import Tree
from centella.tasks.chat import ChatTemplate
from centella.tasks.pieces import Stops, Text
from centella.tasks.sampling import Sampling, SamplingArgs
from centella.tasks.session import LEAST, Array, Ids, Session
from centella.tensors.arguments import whole
from centella.tensors.tensor import Tensor
from centella.weights.folder import TOKENIZER
from centella.weights.model_files import kind, read_json

if TYPE_CHECKING:
    from centella.models.llama import LlamaModel
    from centella.tasks.text import Tokenizer
    from centella.weights.gguf import GGUF

Prompt = str | Sequence[int]
ROOM = 256  # capacities are multiples of it
IDLE = 2  # sessions that a Generator keeps


class Generation(Struct, frozen=True):
    """What a prompt was continued with.

    Attributes:
        ids: the tokens, without the one that ended it.
        text: them as text; None for a model without a tokenizer.
        finish: "stop" (a stop token or string), "length" (`max_new_tokens`), or "context" (the
            model has no more positions).
        prompt_tokens: tokens of the prompt.
    """

    ids: Ids
    text: str | None
    finish: str
    prompt_tokens: int


class GeneratorConfig(Struct, frozen=True):
    """What a folder says of generation.

    Attributes:
        stop_ids: tokens that end a text.
        sampling: how tokens are chosen where a call says nothing.
        begin_id: the token that a text begins with, where its tokenizer adds none.
    """

    stop_ids: frozenset[int] = frozenset()
    begin_id: int | None = None
    sampling: Sampling = Sampling()

    @classmethod
    def from_folder(cls, folder: Path) -> GeneratorConfig:
        """Read generation_config.json, config.json and tokenizer_config.json.

        Raises:
            WeightsError: a file that is malformed.
        """
        stops: set[int] = set()
        file = folder / "generation_config.json"
        own = read_json(file)
        config = read_json(folder / "config.json")
        for source in (own, config):
            stated = source.get("eos_token_id")
            several = stated if isinstance(stated, list) else [stated]
            stops.update(i for i in several if type(i) is int and i >= 0)
        begin = config.get("bos_token_id")
        begin = begin if type(begin) is int and begin >= 0 else None
        return cls(frozenset(stops), begin, Sampling.from_config(own, str(file)))


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

    def generate(
        self, prompts: Prompt | Sequence[Prompt] | Array, *, max_new_tokens: int = 256,
        stop: str | Sequence[str] = (), ignore_eos: bool = False, n: int = 1,
        **sampling: Unpack[SamplingArgs],
    ) -> Any:  # fmt: skip
        """Continue prompts.

        Args:
            prompts: one text or one sequence of ids, or several of them, of any lengths.
            max_new_tokens: most tokens of each continuation.
            stop: strings that end a continuation, and are not part of it.
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
        for tokens in self._tokens(rows, stops.tokens, chosen):
            for text, token in zip(written, tokens, strict=True):
                text.add(int(token))
            if all(text.finish for text in written):
                break
        made = [
            Generation(t.ids, t.whole(), t.finish or self._end(row, t, stops), len(row))
            for t, row in zip(written, rows, strict=True)
        ]
        return made if several or n > 1 else made[0]

    def stream(
        self, prompt: Prompt, *, max_new_tokens: int = 256, stop: str | Sequence[str] = (),
        ignore_eos: bool = False, on_token: Callable[[int], object] | None = None,
        **sampling: Unpack[SamplingArgs],
    ) -> Iterator[str]:  # fmt: skip
        """The continuation of one prompt in pieces of whole characters, as they come.

        Args:
            prompt, max_new_tokens, stop, ignore_eos, sampling: as for `generate`.
            on_token: called with each token, also with one that completes no character.

        Raises:
            As `generate`, here, at the call.
        """
        _, rows = self._rows("stream", prompt)
        stops = self._stops("stream", max_new_tokens, stop, ignore_eos)
        self.tokenizer  # noqa: B018  # raises now where there is none
        chosen = self.config.sampling.with_("stream", sampling)
        return self._pieces(rows[:1], stops, chosen, on_token)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, max_new_tokens: int = 1024,
        stop: str | Sequence[str] = (), template: Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingArgs],
    ) -> Iterator[str]:  # fmt: skip
        """The answer to a conversation, in pieces; what it shares with the last one is not reread.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            template: further variables of the model's chat template.

        Raises:
            WeightsError: the model's folder has no chat template, or it fails.
        """
        return self.stream(
            self.encode_chat(messages, **(template or {})), max_new_tokens=max_new_tokens,
            stop=stop, **sampling,
        )  # fmt: skip

    def warm(self) -> None:
        """Continue a token: programs are compiled, and memory is allocated."""
        self.generate([0], max_new_tokens=2, ignore_eos=True)

    def encode(self, prompt: Prompt) -> Ids:
        """Token ids of one prompt, a text or ids; raises as `generate`."""
        return self._ids("encode", prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> Ids:
        """Token ids of a conversation, up to where the answer begins; raises as `chat`."""
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
        several = [prompts] if one else list(prompts)
        return not one, [self._ids(op, p) for p in several]

    def _ids(self, op: str, prompt: Any) -> Ids:
        vocab = self.model.config.vocab_size
        if isinstance(prompt, str):
            (ids,) = self.tokenizer.encode([prompt])
            begin = self.config.begin_id
            ids = ids or ([] if begin is None else [begin])
            self.tokenizer.check_ids([ids], vocab)
        elif isinstance(prompt, Sequence) and all(map(_whole, prompt)):
            ids = [int(i) for i in prompt]
        else:
            raise DTypeError(f"{op}: expected text or whole numbers, got {type(prompt).__name__}")
        if not ids:
            raise ShapeError(f"{op}: expected a prompt of one token or more, got none")
        wrong = next((i for i in ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise ShapeError(f"{op}: expected ids from 0 to {vocab - 1}, got {wrong}")
        if len(ids) >= self.context:
            raise ShapeError(
                f"{op}: expected a prompt of fewer than {self.context:,} tokens, the context of "
                f"the model, got {len(ids):,}"
            )
        return ids

    def _stops(self, op: str, tokens: Any, stop: Any, ignore_eos: bool) -> Stops:
        texts = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(not isinstance(t, str) or not t for t in texts):
            raise DTypeError(f"{op}: stop: expected strings that are not empty, got {texts!r}")
        if texts:
            self.tokenizer  # noqa: B018  # raises now where there is none
        ids: frozenset[int] = frozenset() if ignore_eos else self.config.stop_ids
        return Stops(ids, texts, whole(op, "max_new_tokens", tokens, 1))

    # -- the loop ---------------------------------------------------------------------------------

    def _tokens(self, rows: list[Ids], most: int, sampling: Sampling) -> Iterator[Array]:
        """Tokens [batch] of step after step, at most `most`, and as long as there is room."""
        longest = max(map(len, rows))
        steps = min(most, self.context - longest)
        session = self._session(len(rows), longest + steps)
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

    def _session(self, batch: int, tokens: int) -> Session:
        """An idle session of that size, or a new one."""
        capacity = min(self.context, -(-(tokens + LEAST) // ROOM) * ROOM)
        with self._lock:
            if self._tree.changed:
                self._idle, self._tree = [], Tree(self.model)
            for session in self._idle:
                if session.batch == batch and session.capacity >= capacity:
                    self._idle.remove(session)
                    return session
        return Session(self.model, batch, capacity)

    def _pieces(
        self,
        rows: list[Ids],
        stops: Stops,
        sampling: Sampling,
        on_token: Callable[[int], object] | None,
    ) -> Iterator[str]:
        text = Text(self._decode, stops)
        for (token,) in self._tokens(rows, stops.tokens, sampling):
            piece = text.add(int(token))
            if on_token is not None:
                on_token(int(token))
            if piece:
                yield piece
            if text.finish:
                break
        rest = text.rest()
        if rest:
            yield rest

    def _end(self, row: Ids, text: Text, stops: Stops) -> str:
        return "length" if len(text.ids) >= stops.tokens else "context"


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
    return partial(Generator, tokenizer=tokenizer, config=config, template=template)
