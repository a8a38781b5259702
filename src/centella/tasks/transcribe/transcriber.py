"""`Transcriber`: a speech model, and the whole text of a recording."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

import numpy as np
from msgspec import Struct

from centella.audio.log_mel import log_mel
from centella.audio.mel import RATE
from centella.audio.stream import Given, open_audio
from centella.audio.transcript import Segment, Word
from centella.errors import DTypeError, WeightsError
from centella.host.forks import lock_of
from centella.host.idle import Idle
from centella.nn.tree import Tree
from centella.tasks.text.batches import expect_tokenizer
from centella.tasks.text.tokenizer import Tokenizer, read_tokenizer
from centella.tasks.transcribe.beams import Beams
from centella.tasks.transcribe.options import GENERATION, Options, SpeechConfig, TranscribeArgs
from centella.tasks.transcribe.recording import Recording
from centella.tasks.transcribe.session import LEAST, SpeechSession
from centella.tasks.transcribe.transcription import Decoding, Progress, Transcription
from centella.tensors.arguments import check_called, check_progress
from centella.tensors.hints import OF_MODEL, Hinted
from centella.tensors.tensor import Tensor
from centella.weights.model_files import is_file

if TYPE_CHECKING:
    from centella.models.whisper import WhisperModel

Array = np.ndarray[Any, Any]
IDLE = 2  # sessions that a Transcriber keeps


class Transcript(Struct, frozen=True):
    """The text of a recording.

    Attributes:
        segments: in order, with times in seconds.
        language: a language code; None if the model has only one language.
        duration: of the recording, in seconds.
    """

    segments: tuple[Segment, ...]
    language: str | None
    duration: float

    def __getitem__(self, key: object) -> NoReturn:
        raise DTypeError(f"Transcript: expected .text, .segments, .words, .language, got [{key!r}]")

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def words(self) -> tuple[Word, ...]:
        """Words of all segments; empty unless timestamps="word"."""
        return tuple(word for segment in self.segments for word in segment.words)


class Transcriber(Hinted):
    """A speech model that writes what it hears; `ct.load` makes it.

    Attributes:
        model: Whisper: `model(mel, ids)` gives logits, and so does calling the Transcriber.
    """

    _hints = OF_MODEL

    def __init__(
        self, model: WhisperModel, tokenizer: Tokenizer | Path, config: SpeechConfig | WeightsError
    ) -> None:
        self.model = model
        self._config = config  # an error: what the model's folder lacks
        self._tokenizer = tokenizer  # a Path: the file that the model's folder lacks
        self._idle: Idle[Decoding] = Idle(IDLE)
        self._lock = lock_of(self)
        self._tree = Tree(model)

    def __repr__(self) -> str:
        c = self.model.config
        return (
            f"Transcriber(whisper, {c.encoder_layers} + {c.decoder_layers} layers of "
            f"{c.hidden_size}, {self.model.device!r})"
        )

    def __call__(self, mel: Tensor, ids: Tensor | None = None) -> Tensor:
        """Logits f32 [batch, tokens, vocab] of mel [batch, mels, frames] and ids [batch, tokens].

        Frames are 10 ms, ids i32.
        """
        check_called("Transcriber", [mel], "model.transcribe(audio) gives the text")
        if ids is None:
            raise DTypeError(
                "Transcriber: expected mel and ids, got mel; model.encode(mel) encodes"
            )
        return self.model(mel, ids)

    def encode(self, mel: Tensor) -> Tensor:
        """The encoder's states [batch, places, width] of mel [batch, mels, frames]."""
        return self.model.encode(mel)

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids and back.

        Raises:
            WeightsError: the model's folder has none.
        """
        return expect_tokenizer(self._tokenizer)

    @property
    def config(self) -> SpeechConfig:
        """The special tokens, and the heads that follow the speech.

        Raises:
            WeightsError: the model's folder has neither a tokenizer nor generation_config.json.
        """
        if isinstance(self._config, WeightsError):
            raise self._config.with_traceback(None)
        return self._config

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes of the languages that it knows; ("en",) where it knows but one."""
        return tuple(self.config.vocabulary.languages) or ("en",)

    def transcribe(
        self, audio: Given, *, rate: int = RATE, progress: Progress | None = None,
        **options: Unpack[TranscribeArgs],
    ) -> Transcript:  # fmt: skip
        """Transcribe speech to text.

        Args:
            audio: a path, "-", an open file, samples [n] or [n, channels], or an iterable of
                those; as `centella.audio.open_audio` takes it.
            rate: samples a second, of arrays.
            progress: called with seconds that are done, and in all, after each window.
            options: language, task, timestamps, prompt ...: see `Options`.

        Raises:
            AudioError: what is no audio; names the file.
            ShapeError, DTypeError: an option that cannot be, a language that it does not know.
            WeightsError: the model's folder has no tokenizer; a `vad_model` that is none.
            MissingExtraError: what reads the audio or runs `vad_model` is not installed.
        """
        with self.stream(audio, rate=rate, progress=progress, **options) as running:
            segments = tuple(running)
        return Transcript(segments, running.language, running.duration)

    def stream(
        self, audio: Given, *, rate: int = RATE, progress: Progress | None = None,
        **options: Unpack[TranscribeArgs],
    ) -> Transcription:  # fmt: skip
        """As `transcribe`, but yields each segment when its window is done.

        Arguments and errors are those of `transcribe`.
        """
        self.tokenizer  # noqa: B018  # raises now where there is none
        chosen = Options.of("transcribe", options, self.config.vocabulary)
        check_progress("transcribe", progress)
        stream = open_audio(audio, rate=rate)
        recording = Recording(stream, self.model.config.frames, chosen.regions, chosen.detector())
        return Transcription(self, recording, chosen, progress)

    def warm(self) -> None:
        """Run the model on a second of silence, so that programs are compiled.

        Those of a window at a time, with times of segments, a prompt of any length and every
        temperature. Batches, beams and times of words compile theirs when they are first used.
        """
        silence, positions = np.zeros(RATE, np.float32), self.model.config.max_target_positions
        self.transcribe(
            silence, vad="off", temperature=(0.0, 1.0), logprob_threshold=0.0,
            no_speech_threshold=None, max_new_tokens=2,
        )  # fmt: skip
        decoding, length = self.take(1, 1), LEAST
        while length < positions:
            length = min(2 * length, positions)
            decoding.session.read([[self.config.vocabulary.start] * length], 0)
        self.give(decoding)

    # -- sessions ---------------------------------------------------------------------------------

    def take(self, batch: int, beam: int) -> Decoding:
        """An idle session for so many windows and beams, or a new one."""
        with self._lock:
            if self._tree.changed:
                self._idle.clear()
                self._tree = Tree(self.model)
            for kept in self._idle.waiting:
                if (kept.session.batch, kept.session.beam) == (batch, beam):
                    return self._idle.use(kept)
        mels, vocabulary = self.model.config.num_mel_bins, self.config.vocabulary
        session = SpeechSession(
            self.model, vocabulary, batch, lambda sound: log_mel(sound, mels), beam
        )
        decoding = Decoding(session, Beams(session) if beam > 1 else None)
        with self._lock:
            return self._idle.use(decoding)

    def give(self, decoding: Decoding) -> None:
        """Keep a session that is no longer used."""
        self._idle.give(decoding)

    def drop(self, decoding: Decoding) -> None:
        """Forget a session that was used."""
        self._idle.drop(decoding)


def read_transcriber(folder: Path, vocab_size: int) -> Callable[[WhisperModel], Transcriber]:
    """Read what a Transcriber has beside its model, which the function returned takes.

    Raises:
        WeightsError: a file that is malformed.
        MissingExtraError: the folder has a tokenizer, and its library is not installed.
    """
    tokenizer = read_tokenizer(folder, vocab_size)
    named: dict[str, int] = {}
    if not isinstance(tokenizer, Path):
        added = tokenizer.native.get_added_tokens_decoder()
        named = {token.content: i for i, token in added.items()}
    config: SpeechConfig | WeightsError
    try:
        config = SpeechConfig.from_folder(folder, vocab_size, named)
    except WeightsError as error:
        if named or is_file(folder / GENERATION):
            raise
        config = error  # of a model that is called with spectrograms and ids
    return partial(Transcriber, tokenizer=tokenizer, config=config)
