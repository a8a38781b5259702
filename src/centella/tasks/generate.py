"""Prompts to text: prefill in chunks, then one replay a token, one token ahead of the host.

The last token of each sequence lives in a State: a step reads it, computes the next one, writes it
there and sends it to the host, 4 bytes a sequence. The next step is submitted before the host has
read that token. A step that turns out to be after the end is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from msgspec import Struct

from centella.dtypes import i32
from centella.errors import DTypeError, ShapeError, WeightsError
from centella.host.forks import lock_of
from centella.nn.tree import Tree
from centella.op.op import get
from centella.ops.sample import PROMPT, SETTINGS
from centella.runtime.pending import Pending
from centella.tasks.chat import ChatTemplate
from centella.tasks.sampling import Sampling, SamplingArgs
from centella.tensors.arguments import whole
from centella.tensors.functional import argmax
from centella.tensors.jit import Jitted
from centella.tensors.state import State
from centella.tensors.tensor import Tensor, apply_all
from centella.weights.folder import TOKENIZER
from centella.weights.model_files import kind, read_json

if TYPE_CHECKING:
    from centella.models.llama import LlamaModel
    from centella.tasks.text import Tokenizer

Array = np.ndarray[Any, Any]
Ids = list[int]
Prompt = str | Sequence[int]
CHUNK = 512  # tokens of a prompt that are read at once
LEAST = 16  # a last part is padded to a power of two from here on: few captures
ROOM = 256  # capacities are multiples of it
IDLE = 2  # sessions that a Generator keeps


class Stops(Struct, frozen=True):
    """When a sequence ends.

    Attributes:
        ids: tokens that end it, and are not part of it.
        texts: strings that end it, and are not part of it.
        tokens: most tokens.
    """

    ids: frozenset[int]
    texts: tuple[str, ...]
    tokens: int


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


class Session:
    """A batch of sequences on the device: their past, their last tokens, and what steps them.

    Args:
        model: the decoder.
        batch: sequences; capacity: tokens that each may have.
    """

    def __init__(self, model: LlamaModel, batch: int, capacity: int) -> None:
        self.model, self.batch, self.capacity = model, batch, capacity
        self.past = model.past(batch, capacity)
        self.rows: list[Ids] = [[] for _ in range(batch)]  # read and written, of each sequence
        device = model.device
        vocab = model.config.vocab_size

        def state(name: str, shape: tuple[int, ...], dtype: type = np.int32) -> State:
            return State(np.zeros(shape, dtype), device=device, name=name)

        self._token = state("last tokens", (batch, 1))
        self._counts = state("counts of tokens", (batch, vocab))
        self._drawn = state("tokens drawn", (batch,))
        self._seeds = state("seeds", (batch,))
        self._settings = state("sampling", (batch, len(SETTINGS)), np.float32)
        self._greedy: Jitted[..., Tensor] = Jitted(self._likeliest, device)
        self._random: Jitted[..., Tensor] = Jitted(self._sampled, device)
        self._step = self._greedy
        self._fill: Jitted[..., None] = Jitted(self._read, device)

    def _likeliest(self) -> Tensor:
        """The most likely token after each sequence's last one, [batch] i32; it becomes the last."""
        return self._written(argmax(self._logits(), -1))

    def _sampled(self) -> Tensor:
        """A token drawn after each sequence's last one, [batch] i32; it becomes the last."""
        given = (self._counts.value, self._drawn.value, self._logits(), self._settings.value,
                 self._seeds.value)  # fmt: skip
        return self._written(apply_all(get("sample"), given, {})[2])

    def _logits(self) -> Tensor:
        return self.model(self._token.value, self.past)[:, 0]

    def _written(self, chosen: Tensor) -> Tensor:
        self._token.assign(chosen.reshape(self.batch, 1))
        return chosen

    def choose_by(self, sampling: Sampling, rows: Sequence[Ids]) -> None:
        """Set how tokens are chosen: numbers in States, so that no value needs a capture."""
        self._step = self._greedy if sampling.greedy else self._random
        if sampling.greedy:
            return
        seeds = sampling.first_seed() + np.arange(self.batch, dtype=np.int64)
        self._seeds.assign((seeds & 0x7FFFFFFF).astype(np.int32))
        self._settings.assign(np.tile(np.float32(sampling.numbers()), (self.batch, 1)))
        self._drawn.assign(0)
        if sampling.penalised:
            counts = np.zeros(self._counts.shape, np.uint32)
            for count, row in zip(counts, rows, strict=True):
                count[row] = PROMPT
            self._counts.assign(counts.view(np.int32))

    def _read(self, ids: Tensor) -> None:
        self.model.states(ids, self.past)

    def start(self, rows: Sequence[Ids], chunk: int = CHUNK) -> None:
        """Read all but the last token of each prompt; what was read before is kept.

        Raises:
            KVCacheFullError: there is no room.
        """
        kept = [_common(old, new[:-1]) for old, new in zip(self.rows, rows, strict=True)]
        cache = self.past.cache
        cache.truncate([min(k, n) for k, n in zip(kept, cache.lengths, strict=True)])
        kept = list(cache.lengths)
        self.rows = [[] for _ in rows]  # until all is read
        rest = [row[k:-1] for row, k in zip(rows, kept, strict=True)]
        left = max(map(len, rest))
        at = 0
        while left:
            room = self.capacity - max(cache.lengths)
            tokens = _part(left, min(chunk, room), room)
            part = np.zeros((self.batch, tokens), np.int32)
            for row, ids in enumerate(rest):
                some = ids[at : at + tokens]
                part[row, : len(some)] = some
            self._fill(part)
            at, left = at + tokens, max(0, left - tokens)
        cache.truncate([len(row) - 1 for row in rows])
        self.rows = [list(row) for row in rows]
        self._token.assign(np.array([[row[-1]] for row in rows], np.int32))

    def add(self, tokens: Array) -> None:
        """Note the tokens of a step."""
        for row, token in zip(self.rows, tokens, strict=True):
            row.append(int(token))

    def step(self) -> Pending[Array]:
        """Submit a step; the tokens [batch] i32 when it is done."""
        return self._step.fetch()

    def run(self, steps: int) -> Iterator[Array]:
        """Tokens [batch] of each step, one step ahead of the device."""
        under_way: deque[Pending[Array]] = deque()
        for _ in range(steps):
            under_way.append(self.step())
            if len(under_way) > 1:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


def _common(old: Ids, new: Ids) -> int:
    """Tokens that both begin with."""
    most = min(len(old), len(new))
    return next((i for i in range(most) if old[i] != new[i]), most)


def _part(left: int, chunk: int, room: int) -> int:
    """Tokens to read next: whole chunks, then a part padded to a power of two, if there is room."""
    if left >= chunk:
        return chunk
    padded = max(LEAST, 1 << (left - 1).bit_length())
    return padded if padded <= room else 1 << (left.bit_length() - 1)


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
        written = [_Text(self, stops) for _ in rows]
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
        self, rows: list[Ids], stops: Stops, sampling: Sampling,
        on_token: Callable[[int], object] | None,
    ) -> Iterator[str]:
        text = _Text(self, stops)
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

    def _end(self, row: Ids, text: _Text, stops: Stops) -> str:
        return "length" if len(text.ids) >= stops.tokens else "context"


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class _Text:
    """The tokens of a sequence as they come, and their text, whole characters at a time."""

    def __init__(self, generator: Generator, stops: Stops) -> None:
        self.ids: Ids = []
        self.finish = ""
        self._stops = stops
        self._text = ""
        self._told = 0  # characters that were given
        tokenizer = generator._tokenizer
        self._decode: Callable[[Ids], str] | None = None
        if not isinstance(tokenizer, Path):
            self._decode = partial(tokenizer.native.decode, skip_special_tokens=True)
        # A token's text can depend on the one before it: both are decoded, from `_from` on.
        self._from, self._read, self._before = 0, 0, ""

    def add(self, token: int) -> str:
        """The characters that one token more completes."""
        if self.finish:
            return ""
        if token in self._stops.ids:
            self.finish = "stop"
            return self.rest()
        self.ids.append(token)
        if len(self.ids) >= self._stops.tokens:
            self.finish = "length"
        if self._decode is not None and self._decoded(self._decode, bool(self.finish)):
            self.finish = "stop"
        return self.rest() if self.finish else self._given(self._certain())

    def _decoded(self, decode: Callable[[Ids], str], last: bool) -> bool:
        """Add what the tokens read so far complete; whether a stop string has come."""
        both = decode(self.ids[self._from :])
        if both.endswith("\ufffd") and not last:  # a character of several tokens
            return False
        self._text += both[len(self._before) :]
        self._from, self._read = self._read, len(self.ids)
        self._before = decode(self.ids[self._from :])
        places = [i for s in self._stops.texts if (i := self._text.find(s)) >= 0]
        if places:
            self._text = self._text[: min(places)]
        return bool(places)

    def _certain(self) -> int:
        """Characters that cannot be the begin of a stop string."""
        text, end = self._text, len(self._text)
        for stop in self._stops.texts:
            begun = [n for n in range(1, len(stop)) if text.endswith(stop[:n])]
            end = min(end, len(text) - max(begun, default=0))
        return end

    def _given(self, end: int) -> str:
        piece = self._text[self._told : end]
        self._told = max(self._told, end)
        return piece

    def rest(self) -> str:
        """What has not been given yet."""
        return self._given(len(self._text))

    def whole(self) -> str | None:
        """All of it; None without a tokenizer."""
        return None if self._decode is None else self._text


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
