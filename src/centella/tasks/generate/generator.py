"""`Generator`: prompts to text, in batches, in pieces as they come, and as a chat."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Generator as Pieces
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, overload

from centella.errors import DeviceError, DTypeError, ShapeError
from centella.host.event_loop import in_thread
from centella.tasks.chat.messages import ChatTemplate
from centella.tasks.generate import speculation
from centella.tasks.generate.beam_settings import BeamSettings, EarlyStopping
from centella.tasks.generate.logprobs import logprobs_of, tokens_of
from centella.tasks.generate.pieces import Generation, Text
from centella.tasks.generate.prompts import Asked, Prompts, continuations
from centella.tasks.generate.sampling import GeneratorConfig, SamplingArgs
from centella.tasks.generate.session import Array, Ids
from centella.tasks.generate.sessions import Sessions
from centella.tasks.generate.stream import Stream
from centella.tensors.arguments import check_called
from centella.tensors.hints import OF_MODEL, Hinted
from centella.tensors.tensor import Tensor
from centella.weights.model_files import show

if TYPE_CHECKING:
    from centella.models.llama import LlamaModel
    from centella.tasks.text.tokenizer import Tokenizer

__all__ = ["Generation", "Generator"]
Prompt = str | Sequence[int]
Several = list[str] | list[list[int]] | list[str | list[int]]
DraftBy: TypeAlias = "Literal['lookup'] | Generator | None"
CacheBy = Literal["i8"] | None


class Options(SamplingArgs, total=False):
    """Keyword arguments of `Generator.generate`, as it documents them."""

    max_new_tokens: int
    stop: str | Sequence[str]
    ignore_eos: bool
    logprobs: int | None
    draft: DraftBy
    cache: CacheBy
    beam: int
    length_penalty: float
    early_stopping: EarlyStopping


class Generator(Hinted):
    """A language model that continues prompts; `ct.load` returns it.

    Attributes:
        model: the decoder. `model(ids)` returns logits, and so does calling the Generator.
        config: which tokens end a text.
    """

    _hints = OF_MODEL

    def __init__(
        self, model: LlamaModel, tokenizer: Tokenizer | Path, config: GeneratorConfig,
        template: ChatTemplate | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.config = config
        self.template = template
        c = model.config
        self._prompts = Prompts(tokenizer, c.vocab_size, c.max_position_embeddings, c.limit)
        self._sessions = Sessions(model)

    def __repr__(self) -> str:
        c = self.model.config
        return (
            f"Generator({c.model_type}, {c.num_hidden_layers} layers of {c.hidden_size}, "
            f"{self.model.device!r})"
        )

    def __call__(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Logits f32 [batch, tokens, vocab] of ids [batch, tokens] i32."""
        check_called("Generator", [ids], "model.generate(text) continues a text")
        return self.model(ids, *args, **kwargs)

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids and back.

        Raises:
            WeightsError: the model's folder has none.
        """
        return self._prompts.tokenizer

    @property
    def context(self) -> int:
        """The largest number of tokens of a prompt and its continuation."""
        return self.model.config.max_position_embeddings

    @overload
    def generate(
        self, prompts: str, *, n: Literal[1] = 1, **options: Unpack[Options]
    ) -> Generation: ...
    @overload
    def generate(
        self, prompts: Several, *, n: int = 1, **options: Unpack[Options]
    ) -> list[Generation]: ...
    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt] | Array | Tensor, *, n: int = 1,
        **options: Unpack[Options],
    ) -> Any: ...  # fmt: skip
    def generate(
        self, prompts: Prompt | Sequence[Prompt] | Array | Tensor, *, max_new_tokens: int = 256,
        stop: str | Sequence[str] = (), ignore_eos: bool = False, n: int = 1,
        logprobs: int | None = None, draft: DraftBy = None, cache: CacheBy = None, beam: int = 1,
        length_penalty: float = 1.0, early_stopping: EarlyStopping = False,
        **sampling: Unpack[SamplingArgs],
    ) -> Any:  # fmt: skip
        """Continue prompts.

        Args:
            prompts: one text or one sequence of ids, or several of them, of any lengths.
            max_new_tokens: most tokens of each continuation.
            stop: strings, or special tokens, that end a continuation; they are not part of the
                result.
            ignore_eos: continue after end tokens.
            n: continuations of each prompt, which is read once; with beams its best texts, `beam`
                at most.
            logprobs: 0 for the log-probability of each token; k up to 20 also for the k most likely
                tokens at each step: `Generation.logprobs`.
            draft: guesses tokens that this model then verifies, several in one step: "lookup" for
                the tokens that followed the last ones earlier in the text, or a smaller Generator
                on this device. The result equals that of None up to the rounding of logits, which
                is coarse for 16-bit activations. Used for a single continuation without penalties
                and log-probabilities only.
            cache: "i8" for keys and values in 8 bits with a scale for each row: half the memory,
                and half the reads of a step, of 16 bits. The error of an element is at most 1/254
                of the largest element of its row. None: the dtype of the activations.
            beam: texts of each prompt that are followed at once, up to 16: beam search, as in
                transformers. Nothing is drawn: the model's folder does not say how to sample.
            length_penalty: with beams, a text's score is the sum of its log-probabilities, that of
                its end token included, over the number of its tokens to this power.
            early_stopping: with beams, True ends a search when `beam` texts have ended; False when
                no text that runs would be among the best if it ended now; "never" when none can
                be.
            sampling: temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty,
                presence_penalty, seed: see `Sampling`; default: as the model's folder says, else
                the most likely token.

        Returns:
            A `Generation`. For several prompts, or n > 1, a list: those of the first prompt, then
            those of the second, and so on; with beams the best first.

        Raises:
            ShapeError: an empty prompt, one that leaves no room for another token, or an id outside
                the vocabulary; with beams settings of sampling, a draft, or more texts than beams.
            DTypeError: a prompt that is neither text nor ids.
            WeightsError: text for a model without a tokenizer, or of which the tokenizer makes an
                id that the model has no vector for.
        """
        return self._generated(
            "generate", prompts, threading.Event(), n, max_new_tokens=max_new_tokens, stop=stop,
            ignore_eos=ignore_eos, logprobs=logprobs, draft=draft, cache=cache, beam=beam,
            length_penalty=length_penalty, early_stopping=early_stopping, **sampling,
        )  # fmt: skip

    @overload
    async def generate_async(
        self, prompts: str, *, n: Literal[1] = 1, **options: Unpack[Options]
    ) -> Generation: ...
    @overload
    async def generate_async(
        self, prompts: Several, *, n: int = 1, **options: Unpack[Options]
    ) -> list[Generation]: ...
    @overload
    async def generate_async(
        self, prompts: Prompt | Sequence[Prompt] | Array | Tensor, *, n: int = 1,
        **options: Unpack[Options],
    ) -> Any: ...  # fmt: skip
    async def generate_async(self, prompts: Any, *, n: int = 1, **options: Unpack[Options]) -> Any:
        """`generate` in a thread of asyncio's; raises the same errors.

        Cancelling the task ends the generation after the current token; the Generator stays usable.
        Several tasks may share it.

        Args:
            prompts, n, options: as for `generate`.
        """
        ending = threading.Event()
        work = partial(self._generated, "generate_async", prompts, ending, n, **options)
        return await in_thread(work, ending)

    def _generated(
        self, op: str, prompts: Any, ending: threading.Event, n: int, *, max_new_tokens: int = 256,
        stop: str | Sequence[str] = (), ignore_eos: bool = False, logprobs: int | None = None,
        draft: DraftBy = None, cache: CacheBy = None, beam: int = 1, length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False, **sampling: Unpack[SamplingArgs],
    ) -> Any:  # fmt: skip
        several, rows = self._prompts.rows(op, prompts, self.config.begin_id)
        n = continuations(op, n)
        beams = BeamSettings.of(op, beam, length_penalty, early_stopping, n)
        asked = self._prompts.asked(
            op, self.config, sampling, tokens=max_new_tokens, stop=stop, ignore_eos=ignore_eos,
            logprobs=logprobs, draft=self._draft(op, draft), cache=cache, beams=beams,
        )  # fmt: skip
        each: list[list[Generation]] = [[] for _ in rows]
        for numbers in self._sessions.alike(rows, asked.stops.tokens):
            some = [rows[i] for i in numbers]
            if beams is not None:
                told = self._searched(some, n, asked, ending)
            else:
                own = [i * n + k for i in numbers for k in range(n)]
                told = self._continued(some, n, asked, ending, own)
            for i, generations in zip(numbers, told, strict=True):
                each[i] = generations
        generations = [one for those in each for one in those]
        return generations if several or n > 1 else generations[0]

    def stream(
        self, prompt: Prompt | Array | Tensor, *, max_new_tokens: int = 256,
        stop: str | Sequence[str] = (), ignore_eos: bool = False, logprobs: int | None = None,
        on_token: Callable[[int], object] | None = None, draft: DraftBy = None,
        cache: CacheBy = None, **sampling: Unpack[SamplingArgs],
    ) -> Stream:  # fmt: skip
        """Stream the continuation of one prompt in pieces of whole characters.

        Args:
            prompt, max_new_tokens, stop, ignore_eos, logprobs, draft, cache, sampling: as for
                `generate`.
            on_token: called with each token, even if the token does not complete a character.

        Raises:
            As `generate`, here, at the call.
        """
        several, rows = self._prompts.rows("stream", prompt, self.config.begin_id)
        if several:
            raise ShapeError(
                f"stream: expected one prompt, got {len(rows)}; generate takes several"
            )
        asked = self._prompts.asked(
            "stream", self.config, sampling, tokens=max_new_tokens, stop=stop,
            ignore_eos=ignore_eos, logprobs=logprobs, draft=self._draft("stream", draft),
            cache=cache,
        )  # fmt: skip
        return self._stream("stream", rows[0], asked, on_token)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, max_new_tokens: int = 1024,
        stop: str | Sequence[str] = (), ignore_eos: bool = False, logprobs: int | None = None,
        on_token: Callable[[int], object] | None = None,
        template: Mapping[str, Any] | None = None, parse_special: bool = False,
        draft: DraftBy = None, cache: CacheBy = None, **sampling: Unpack[SamplingArgs],
    ) -> Stream:  # fmt: skip
        """Stream the answer to a conversation, reusing the prefix shared with the last one.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            max_new_tokens, stop, ignore_eos, logprobs, on_token, draft, cache, sampling: as for
                `stream`.
            template: further variables of the model's chat template, such as tools, documents or
                enable_thinking.
            parse_special: whether special tokens written in messages are parsed as tokens, as in
                transformers; False: they are plain text, so that a user's text cannot end a
                message.

        Raises:
            WeightsError: the model's folder has no chat template, or it fails.
            DTypeError: messages of another type, or a field or variable that is not text, a number,
                True, False, None, or lists and mappings of these.
        """
        values = {} if template is None else template
        ids = self._prompts.chat_ids(messages, self.template, values, parse_special)
        row = self._prompts.ids("chat", ids, self.config.begin_id)
        asked = self._prompts.asked("chat", self.config, sampling, tokens=max_new_tokens, stop=stop,
                                    ignore_eos=ignore_eos, logprobs=logprobs,
                                    draft=self._draft("chat", draft), cache=cache)  # fmt: skip
        return self._stream("chat", row, asked, on_token)

    def warm(self) -> None:
        """Generate one token, so that programs are compiled and memory is allocated."""
        self.generate([0], max_new_tokens=2, ignore_eos=True)

    def encode(self, prompt: Prompt, *, parse_special: bool = True) -> Ids:
        """Token ids of one prompt, a text or ids; raises as `generate`.

        Args:
            prompt: as for `generate`.
            parse_special: whether special tokens written in a text are parsed as tokens; False:
                they are plain text, as in messages.
        """
        begin = self.config.begin_id
        return self._prompts.ids("encode", prompt, begin, parse_special=parse_special)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, parse_special: bool = False, **values: Any
    ) -> Ids:
        """Token ids of a conversation, up to the start of the answer; raises as `chat`.

        Args:
            messages, parse_special: as for `chat`.
            values: further variables of the model's chat template.
        """
        return self._prompts.chat_ids(messages, self.template, values, parse_special)

    def _draft(self, op: str, draft: Any) -> LlamaModel | str | None:
        """Who guesses: "lookup", the model of a Generator, or nobody.

        Raises:
            DTypeError: something else; DeviceError: a Generator on another device.
        """
        if draft is None or (isinstance(draft, str) and draft == speculation.LOOKUP):
            return draft
        if not isinstance(draft, Generator):
            raise DTypeError(
                f'{op}: draft: expected "lookup", a Generator or None, got {show(draft)}'
            )
        if draft.model.device is not self.model.device:
            raise DeviceError(
                f"{op}: draft: expected a model on {self.model.device.name}, got one on "
                f"{draft.model.device.name}"
            )
        return draft.model

    # -- the loop ---------------------------------------------------------------------------------

    def _text(self, asked: Asked) -> Text:
        return Text(self._prompts.decode, asked.stops, asked.logprobs is not None)

    def _searched(
        self, rows: list[Ids], n: int, asked: Asked, ending: threading.Event
    ) -> list[list[Generation]]:
        """The best texts of each prompt, by beams."""
        empty = self._text(asked)
        searches = self._sessions.search(rows, asked, ending, empty)
        end = "closed" if ending.is_set() else "context"
        pairs = zip(rows, searches, strict=True)
        return [search.generations(n, empty, end, len(row)) for row, search in pairs]

    def _continued(
        self, rows: list[Ids], n: int, asked: Asked, ending: threading.Event, numbers: Sequence[int]
    ) -> list[list[Generation]]:
        """The continuations of each prompt; `numbers` as for `_written`."""
        texts = [self._text(asked) for _ in numbers]
        for _ in self._written(rows, texts, asked, ending, numbers=numbers):
            pass
        each = [text.generation(len(rows[i // n])) for i, text in enumerate(texts)]
        return [each[i : i + n] for i in range(0, len(each), n)]

    def _stream(
        self, op: str, row: Ids, asked: Asked, on_token: Callable[[int], object] | None
    ) -> Stream:
        self._prompts.tokenizer_for(f"{op} gives pieces of text, generate gives ids")
        if on_token is not None and not callable(on_token):
            raise DTypeError(f"{op}: on_token: expected a function, got {show(on_token)}")
        text, ending = self._text(asked), threading.Event()
        pieces = self._written([row], [text], asked, ending, on_token)
        return Stream(pieces, text, len(row), ending)

    def _written(
        self, rows: list[Ids], texts: list[Text], asked: Asked, ending: threading.Event,
        on_token: Callable[[int], object] | None = None, numbers: Sequence[int] = (0,),
    ) -> Pieces[str]:  # fmt: skip
        """Write the texts, token by token, until `ending` is set; the pieces of the first one.

        Args:
            numbers: of the texts, which are added to the seed.
        """
        n, tally = len(texts) // len(rows), texts[0].tally
        with closing(self._sessions.steps(rows, n, asked, ending, tally, numbers)) as steps:
            for step in steps:
                tokens = tokens_of(step).tolist()
                pieces = [
                    text.add(token, logprobs_of(step, i))
                    for i, (text, token) in enumerate(zip(texts, tokens, strict=True))
                ]
                if on_token is not None:
                    on_token(tokens[0])
                if pieces[0]:
                    yield pieces[0]
                if ending.is_set() or all(text.finish for text in texts):
                    break
        rest = [text.end("closed" if ending.is_set() else "context") for text in texts]
        if rest[0]:
            yield rest[0]
