"""A batch of windows of sound on the device, and the steps that write what is said in them.

`listen` runs the encoder and keeps keys and values of the sound in States. `start` reads prompts;
`run` gives tokens, a step ahead of the host, 4 bytes a row. Logarithms of probabilities add up on
the device, and come to the host when the window's text has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Generator as Pieces
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from centella.errors import ContractError
from centella.nn.kv_cache import KVCache
from centella.op.op import get
from centella.ops.speech_host import ENDED, LAST, NOTES, SEED
from centella.runtime.pending import Pending
from centella.tasks.generate.run_ahead import run_ahead
from centella.tasks.transcribe.rules import NoRepeat, Suppress, Vocabulary, end
from centella.tensors import functional as fn
from centella.tensors.creation import arange, asarray
from centella.tensors.jit import Jitted, method_of
from centella.tensors.state import State
from centella.tensors.tensor import Tensor, apply_all, fetch

if TYPE_CHECKING:
    from centella.models.whisper import WhisperModel

Array = np.ndarray[Any, Any]
Ids = list[int]
ALIGNED = 1 << 27  # bytes of attention that comes to the host at once
LEAST = 4  # tokens of a prompt that is read: a power of two from here on, so few captures


class Heard(Struct, frozen=True, eq=False):
    """What the device has summed up of each row: arrays [batch].

    Attributes:
        log_probability: of the tokens chosen, added up; no_speech: probability at the begin.
    """

    log_probability: Array
    no_speech: Array


class SpeechSession:
    """A batch of windows: their sound, their texts, and what steps them.

    Args:
        model: Whisper; vocabulary: its special tokens; batch: windows.
        features: a spectrogram [batch, mels, frames] of what `listen` is given.
        beam: texts of a window that `Beams` follows at once.
    """

    def __init__(
        self, model: WhisperModel, vocabulary: Vocabulary, batch: int,
        features: Callable[[Tensor], Tensor], beam: int = 1,
    ) -> None:  # fmt: skip
        self.model: WhisperModel = model
        self.vocabulary: Vocabulary = vocabulary
        self.batch: int = batch
        self.beam: int = beam
        self._features = features
        c, device = model.config, model.device
        heads = c.decoder_attention_heads
        self._memory = model.empty_memory(batch)
        self._places = asarray(np.array([c.max_source_positions, 0], np.int32), device=device)
        self.cache: KVCache = KVCache(
            batch, heads, c.hidden_size // heads, beam * c.max_target_positions,
            num_layers=c.decoder_layers, dtype=model.dtype, device=device,
        )  # fmt: skip

        def state(name: str, columns: int, kind: type = np.int32) -> State:
            return State(np.zeros((batch, columns), kind), device=device, name=name)

        self._token, self._notes = state("tokens", 1), state("notes", len(NOTES))
        self._sums = state("log p, temperature", 2, np.float32)
        self._silence = state("no speech", 1, np.float32)
        self.suppress: Suppress = Suppress(vocabulary, device)
        self.no_repeat: NoRepeat = NoRepeat(vocabulary, batch, c.max_target_positions, device)
        self._listen: Jitted[..., None] = Jitted(method_of(self._heard), device)
        self._read: Jitted[..., Tensor] = Jitted(method_of(self._prompt), device)
        self._align: Jitted[..., tuple[Tensor, Tensor]] = Jitted(method_of(self._weights), device)
        self._captured: dict[tuple[bool, bool, bool], Jitted[..., Tensor]] = {}
        self._chosen = (True, False, False)

    # -- what is captured -------------------------------------------------------------------------

    def memory(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the sound in each decoder layer: views [batch, heads, places, dim]."""
        return [layer.rows(self._by_window) for layer in self._memory]

    def _by_window(self, stored: Tensor) -> Tensor:
        """[1, heads, batch * places, dim] to [batch, heads, places, dim]."""
        _, heads, places, dim = stored.shape
        split = stored.reshape(heads, self.batch, places // self.batch, dim)
        return split.permute(1, 0, 2, 3)

    def heard_by(self, ended: Tensor) -> Tensor | None:
        """Places that each row attends to, i32 [batch]: none of a row that has ended; None: all.

        So the sound of a row without a window, or whose text is written, is not read.

        Args:
            ended: i32 [batch], 0 or 1. A batch of one row has no step after its end.
        """
        return fn.gather(self._places, ended) if self.batch > 1 else None

    def _heard(self, sound: Tensor, starts: Tensor) -> None:
        """Encode windows; the sound's keys and values are stored from the place `starts` [1] on."""
        states = self.model.encode(self._features(sound))
        windows, places, width = states.shape
        memory = self.model.memory(states.reshape(1, windows * places, width))
        for layer, (keys, values) in zip(self._memory, memory, strict=True):
            layer.write(keys, values, starts)

    def _prompt(self, ids: Tensor, begins: Tensor) -> Tensor:
        """Read prompts [batch, tokens]; probabilities of the languages, [batch, languages]."""
        x = self.model.decoder(ids, self.memory(), self.cache)
        here = fn.eq(arange(ids.shape[1], device=ids.device), begins)
        x = fn.sum(fn.where(here.reshape(*here.shape, 1), x, 0.0), 1, keepdims=True)
        logits = self.model.head(x)[:, 0]  # where the transcript begins
        no_speech = fn.softmax(logits, -1)[:, self.vocabulary.no_speech]
        self._silence.assign(no_speech.reshape(self.batch, 1))
        self.no_repeat.begin()
        ids_of = list(self.vocabulary.languages.values())
        languages = [logits[:, i : i + 1] for i in ids_of]
        return fn.softmax(fn.concat(languages, -1), -1) if languages else no_speech

    def _stepped(self, timed: bool, no_repeat: bool, random: bool) -> Tensor:
        """The next token of each row, [batch] i32; -1: none has a finite logit.

        A row that has ended stays so.
        """
        x = self.model.decoder(
            self._token.value, self.memory(), self.cache,
            memory_lengths=self.heard_by(self._notes.value[:, ENDED]),
        )  # fmt: skip
        logits = self.model.head(x)[:, 0]
        if no_repeat:
            logits = self.no_repeat.masked(logits)
        operands = (self._notes.value, self._sums.value, self._token.value, logits,
                    self.suppress.levels)  # fmt: skip
        rules = self.vocabulary.rules(timed, random)
        tokens = apply_all(get("speech_token"), operands, rules)[3]
        if no_repeat:
            self.no_repeat.taken(tokens.reshape(self.batch, 1))
        return tokens

    def _weights(
        self, ids: Tensor, following: Tensor, rows: Tensor, heads: tuple[tuple[int, int], ...]
    ) -> tuple[Tensor, Tensor]:
        """Attention of the heads [rows, heads, tokens, places], and probabilities of what follows.

        The head is applied to a row at a time: its logits take 100 MB.
        """
        memory = [(fn.gather(k, rows), fn.gather(v, rows)) for k, v in self.memory()]
        weights = self.model.decoder.weights(ids, memory, heads)
        x, sure = self.model.decoder(ids, memory), list[Tensor]()
        every = arange(self.model.config.vocab_size, device=ids.device)
        for row in range(ids.shape[0]):
            probabilities = fn.softmax(self.model.head(x[row : row + 1]), -1)
            own = fn.eq(every, following[row : row + 1].reshape(1, ids.shape[1], 1))
            sure.append(fn.sum(fn.where(own, probabilities, 0.0), -1))
        return weights, fn.concat(sure, 0)

    # -- what the host calls ----------------------------------------------------------------------

    def listen(self, sound: Array, first: int = 0) -> None:
        """Encode windows as the rows from `first` on, in one submission.

        Args:
            sound: samples [windows, n], or what `features` takes.
        """
        places = self.model.config.max_source_positions
        self._listen(sound, np.array([first * places], np.int32))

    def languages(self) -> Array:
        """Probabilities f32 [batch, languages], in the order of the vocabulary's."""
        return self.read([[self.vocabulary.start]] * self.batch, 0).numpy()

    def start(
        self, prompts: Sequence[Ids], begin: int, *, timed: bool, temperature: float = 0.0,
        seed: int = 0, no_repeat: int = 0, active: Sequence[bool] | None = None,
    ) -> None:  # fmt: skip
        """Read the prompts, and set how tokens are chosen.

        Args:
            prompts: of each row, of one length; begin: where the transcript begins in it.
            timed: whether times come; temperature: 0 takes the most likely token.
            seed: row i has seed + i; no_repeat: n of n-grams that come once; 0: any may repeat.
            active: rows whose text is wanted; the others end at once.
        """
        self._chosen = (timed, no_repeat > 0, temperature > 0)
        if no_repeat:
            self.no_repeat.choose(no_repeat)
        self.read(prompts, begin)
        self.cache.truncate(len(prompts[0]) - 1)  # the first step feeds the last one again
        self._token.assign(np.array([[row[-1]] for row in prompts], np.int32))
        notes = np.zeros(self._notes.shape, np.int32)
        notes[:, ENDED] = [not on for on in active or [True] * self.batch]
        notes[:, LAST] = self.vocabulary.first_time - 1
        notes[:, SEED] = (seed + np.arange(self.batch, dtype=np.int64)) & 0x7FFFFFFF
        self._notes.assign(notes)
        self._sums.assign(np.array([[0.0, temperature]] * self.batch, np.float32))

    def read(self, prompts: Sequence[Ids], begin: int) -> Tensor:
        """Read prompts of one length; probabilities of the languages, [batch, languages]."""
        length = len(prompts[0])
        padded = min(
            self.model.config.max_target_positions, 1 << max(length - 1, LEAST - 1).bit_length()
        )
        ids = np.zeros((self.batch, padded), np.int32)
        ids[:, :length] = prompts
        self.cache.truncate(0)
        return self._read(ids, np.full((self.batch, 1), begin, np.int32))

    def step(self) -> Pending[Array]:
        """Submit a step; the tokens [batch] i32 when it is done."""
        step = self._captured.get(self._chosen)
        if step is None:
            how, stepped = self._chosen, method_of(self._stepped)

            def chosen() -> Tensor:
                return stepped(*how)

            step = self._captured[how] = Jitted(chosen, self.model.device)
        return step.fetch()

    def end(self, row: int) -> None:
        """A row's text has ended, whatever its last token was."""
        end(self._notes, [row])

    def run(
        self, steps: int, meanwhile: Callable[[], None] | None = None,
        wanted: Collection[int] | None = None,
    ) -> Pieces[Array]:  # fmt: skip
        """Tokens [batch] of each step, one step ahead of the device.

        Args:
            meanwhile: called before a wait for the first of two steps under way.
            wanted: rows whose text is not whole yet, read at each step; None: all.

        Raises:
            ContractError: logits of a row that is wanted were NaN or infinite; names it.
        """
        rows = range(self.batch) if wanted is None else wanted
        for count, tokens in enumerate(run_ahead(self.step, steps, meanwhile=meanwhile)):
            row = min((row for row in rows if tokens[row] < 0), default=None)
            if row is not None:
                raise ContractError(
                    f"transcribe: window {row}, token {count}: the logits of what may come are "
                    f"NaN or infinite; dtype='bf16' or 'f32' has a wider range"
                )
            yield tokens

    def aligned(
        self, prompt: Ids, texts: Mapping[int, Sequence[int]], heads: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, Array, Array]]:
        """What the decoder attends to at each token of texts, which it reads once more, together.

        Args:
            texts: tokens by row.
            heads: (layer, head) of those that follow the speech; none: those of the last layers.

        Returns:
            Of each text its row; f32 [heads, tokens, places], softmax over places; f32 [tokens],
            their probabilities.
        """
        c = self.model.config
        if not heads:
            last = range(c.decoder_layers // 2, c.decoder_layers)
            heads = [(layer, head) for layer in last for head in range(c.decoder_attention_heads)]
        first, longest = len(prompt), max(map(len, texts.values()), default=0)
        padded = min(c.max_target_positions, 1 << (first + longest - 1).bit_length())
        room = max(ALIGNED // (4 * len(heads) * padded * c.max_source_positions), 1)
        together = 1 << (room.bit_length() - 1)
        for at in range(0, len(texts), together):
            rows = list(texts)[at : at + together]
            rows += rows[-1:] * ((1 << (len(rows) - 1).bit_length()) - len(rows))  # few captures
            ids = np.zeros((len(rows), padded), np.int32)
            for read, row in zip(ids, rows, strict=True):
                read[: first + len(texts[row])] = [*prompt, *texts[row]]
            which, following = np.array(rows, np.int32), np.roll(ids, -1, 1)
            weights, sure = self._align.fetch(ids, following, which, tuple(heads)).result()
            for i, row in enumerate(dict.fromkeys(rows)):
                end = first + len(texts[row])
                yield row, weights[i, :, first:end], sure[i, first - 1 : end - 1]

    def heard(self) -> Heard:
        """What the device has summed up."""
        sums, silence = fetch(self._sums.value, self._silence.value).result()
        return Heard(sums[:, 0], silence[:, 0])
