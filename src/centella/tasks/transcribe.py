"""`Transcriber`: sound to text with times, window after window or many windows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

import numpy as np
from msgspec import Struct

from centella.audio.log_mel import log_mel
from centella.audio.mel import RATE
from centella.audio.regions import SpeechDetector
from centella.audio.stream import AudioStream, Given, open_audio
from centella.audio.transcript import Segment, Word
from centella.errors import WeightsError
from centella.host.forks import lock_of
from centella.nn.tree import Tree
from centella.tasks.align import token_ends, words
from centella.tasks.recording import Recording, Window
from centella.tasks.rules import Vocabulary
from centella.tasks.speech_options import Options, SpeechConfig, TranscribeArgs
from centella.tasks.speech_session import SpeechSession
from centella.tasks.windows import (
    FRAMES_A_STEP,
    STEP,
    Attempt,
    Cut,
    compression_ratio,
    cut,
    cut_all,
    repeats,
)
from centella.tensors.tensor import Tensor
from centella.weights.folder import TOKENIZER
from centella.weights.model_files import kind

if TYPE_CHECKING:
    from centella.models.whisper import WhisperModel
    from centella.tasks.text import Tokenizer

Array = np.ndarray[Any, Any]
Ids = list[int]
Progress = Callable[[float, float], object]
IDLE = 2  # sessions that a Transcriber keeps
BATCH = 8  # windows at once, of files longer than one whose regions of speech are found
HOT = 0.5  # a text above this temperature is not told to the next window


class Transcript(Struct, frozen=True):
    """What is said in a recording.

    Attributes:
        segments: in order, with times in seconds.
        language: a code; None where the model has but one.
        duration: of the recording, in seconds.
    """

    segments: tuple[Segment, ...]
    language: str | None
    duration: float

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def words(self) -> tuple[Word, ...]:
        """Words of all segments; none where their times were not asked for."""
        return tuple(word for segment in self.segments for word in segment.words)


class Transcriber:
    """A speech model that writes what it hears; `ct.load` makes it.

    Attributes:
        model: Whisper: `model(mel, ids)` gives logits, and so does calling the Transcriber.
        config: its special tokens, and the heads that follow the speech.
    """

    def __init__(
        self, model: WhisperModel, tokenizer: Tokenizer | Path, config: SpeechConfig
    ) -> None:
        self.model = model
        self.config = config
        self._tokenizer = tokenizer  # a Path: the file that the model's folder lacks
        self._idle: list[SpeechSession] = []
        self._lock = lock_of(self)
        self._tree = Tree(model)

    def __repr__(self) -> str:
        c = self.model.config
        return (
            f"Transcriber(whisper, {c.encoder_layers} + {c.decoder_layers} layers of "
            f"{c.hidden_size}, {self.model.device!r})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Transcriber: expected to stay in its process, got a copy or pickle of it; call "
            "ct.load where it is needed"
        )

    def __call__(self, mel: Tensor, ids: Tensor) -> Tensor:
        """Logits f32 [batch, tokens, vocab] of mel [batch, mels, frames] and ids [batch, tokens].

        Frames are 10 ms, ids i32.
        """
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
        if isinstance(self._tokenizer, Path):
            raise WeightsError(f"{self._tokenizer}: expected a tokenizer, got no such file")
        return self._tokenizer

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes of the languages that it knows; ("en",) where it knows but one."""
        return tuple(self.config.vocabulary.languages) or ("en",)

    def transcribe(
        self, audio: Given | AudioStream, *, rate: int = RATE, progress: Progress | None = None,
        **options: Unpack[TranscribeArgs],
    ) -> Transcript:  # fmt: skip
        """Write down what is said.

        Args:
            audio: a path, "-", an open file, samples [n] or [n, channels], or an iterable of
                those; as `centella.audio.open_audio` takes it, or what it gives.
            rate: samples a second, of arrays.
            progress: called with seconds that are done, and in all, after each window.
            options: language, task, timestamps, prompt ...: see `Options`.

        Raises:
            AudioError: what is no audio; names the file.
            ShapeError, DTypeError: an option that cannot be, a language that it does not know.
            WeightsError: the model's folder has no tokenizer.
        """
        with closing(self.stream(audio, rate=rate, progress=progress, **options)) as running:
            segments = tuple(running)
        return Transcript(segments, running.language, running.duration)

    def stream(
        self, audio: Given | AudioStream, *, rate: int = RATE, progress: Progress | None = None,
        **options: Unpack[TranscribeArgs],
    ) -> Transcription:  # fmt: skip
        """As `transcribe`, segment by segment: each comes when its window is done.

        Arguments and errors are those of `transcribe`.
        """
        chosen = Options.of("transcribe", options, self.config.vocabulary)
        self.tokenizer  # noqa: B018  # raises now where there is none
        stream = audio if isinstance(audio, AudioStream) else open_audio(audio, rate=rate)
        detector = None if chosen.vad == "off" else SpeechDetector()
        recording = Recording(stream, self.model.config.frames, chosen.regions, detector)
        return Transcription(self, recording, chosen, progress)

    def warm(self) -> None:
        """Transcribe a second of silence, so that programs are compiled."""
        self.transcribe(np.zeros(RATE, np.float32), temperature=0.0, max_new_tokens=2)

    # -- sessions ---------------------------------------------------------------------------------

    def take(self, batch: int) -> SpeechSession:
        """An idle session for so many windows, or a new one."""
        with self._lock:
            if self._tree.changed:
                self._idle, self._tree = [], Tree(self.model)
            for session in self._idle:
                if session.batch == batch:
                    self._idle.remove(session)
                    return session
        mels = self.model.config.num_mel_bins
        return SpeechSession(
            self.model, self.config.vocabulary, batch, lambda sound: log_mel(sound, mels)
        )

    def give(self, session: SpeechSession) -> None:
        """Keep a session that is no longer used."""
        with self._lock:
            self._idle = [session, *self._idle][:IDLE]


class Transcription(Iterator[Segment]):
    """A recording as it is transcribed: an iterator of segments.

    Attributes:
        language: a code, once the first window is done; None where the model has but one.
    """

    def __init__(
        self, transcriber: Transcriber, recording: Recording, options: Options,
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        self._transcriber, self._recording, self._options = transcriber, recording, options
        self._vocabulary: Vocabulary = transcriber.config.vocabulary
        self._progress = progress
        self.language: str | None = options.language
        self._before: Ids = self._ids(options.prompt)
        self._hot: Ids = self._ids(options.hotwords)
        self._segments = self._run()

    def __iter__(self) -> Iterator[Segment]:
        return self

    def __next__(self) -> Segment:
        """The next segment, when its window is done."""
        return next(self._segments)

    def close(self) -> None:
        """End it here; the file is closed."""
        self._segments.close()
        self._recording.stream.close()

    @property
    def duration(self) -> float:
        """Seconds of the recording, as far as they are known."""
        return self._recording.duration

    # -- the loops --------------------------------------------------------------------------------

    def _run(self) -> Any:
        """Segments, with a session of its own while it runs."""
        known = self._recording.stream.duration or 0.0  # of a microphone nothing is known
        several = known * 100 > self._recording.frames and not self._recording.everything
        batch = self._options.batch or (BATCH if several else 1)
        with closing(self._recording.stream):
            session = self._transcriber.take(batch)
            if batch == 1:
                yield from self._one_by_one(session)
            else:
                yield from self._together(session)
            self._transcriber.give(session)

    def _one_by_one(self, session: SpeechSession) -> Iterator[Segment]:
        """Each window begins where the last segment of the one before ends."""
        at, timed = 0, self._options.timestamps != "none"
        while (at := self._recording.speech_from(at)) >= 0:
            window = self._recording.window(at)
            if window is None:
                return
            self._listen(session, [window])
            (attempt,) = self._attempts(session, 1)
            step = window.frames
            if not self._options.thresholds.silent(attempt):
                first_time = self._vocabulary.first_time
                cuts = _all(attempt.tokens, first_time, window.frames)
                if timed:
                    cuts, step = cut(attempt.tokens, first_time, window.frames)
                cuts = self._with_text(cuts)
                yield from self._told(session, 0, window, attempt, cuts)
                self._remember(attempt, cuts)
            at += max(step, FRAMES_A_STEP)
            self._tell(at)

    def _together(self, session: SpeechSession) -> Iterator[Segment]:
        """Several windows at a time; none knows the text of another."""
        for group in _groups(self._recording.parts(), session.batch):
            self._listen(session, group)
            attempts = self._attempts(session, len(group))
            for row, (window, attempt) in enumerate(zip(group, attempts, strict=True)):
                if not self._options.thresholds.silent(attempt):
                    timed = self._options.timestamps != "none"
                    cuts = (cut_all if timed else _all)(
                        attempt.tokens, self._vocabulary.first_time, window.frames
                    )
                    yield from self._told(session, row, window, attempt, self._with_text(cuts))
                self._tell(window.start + window.frames)

    def _tell(self, frames: int) -> None:
        if self._progress is not None:
            total = self.duration
            self._progress(min(frames / 100, total), total)

    # -- a window ---------------------------------------------------------------------------------

    def _listen(self, session: SpeechSession, windows: Sequence[Window]) -> None:
        """Encode windows; the first ones say the language."""
        session.listen(self._recording.rows(windows, session.batch))
        names = list(self._vocabulary.languages)
        if names and self.language is None:
            self.language = names[int(session.languages()[0].argmax())]

    def _prompt(self) -> tuple[Ids, int]:
        """What a window's text follows, and where the transcript begins in it."""
        v, options = self._vocabulary, self._options
        begin = [v.start]
        if self.language in v.languages:
            begin += [v.languages[self.language]]
            begin += [v.tasks[options.task]] if options.task in v.tasks else []
        begin += [v.no_timestamps] * (options.timestamps == "none")
        room = self._transcriber.model.config.max_target_positions // 2 - 1
        hot = self._hot[:room]
        before = hot + self._before[max(0, len(self._before) - (room - len(hot))) :]
        lead = [v.previous, *before] if before else []
        return lead + begin, len(lead)

    def _attempts(self, session: SpeechSession, count: int) -> list[Attempt]:
        """Texts of the first `count` windows, at the first temperature that gives one believed."""
        options, (prompt, begin) = self._options, self._prompt()
        most = self._transcriber.model.config.max_target_positions
        steps = min(options.max_new_tokens or most // 2, most - len(prompt))
        wanted = [row < count for row in range(session.batch)]
        attempts: dict[int, Attempt] = {}
        for temperature in options.temperature:
            session.start(
                [prompt] * session.batch, begin, timed=options.timestamps != "none",
                temperature=temperature, seed=options.seed, no_repeat=options.no_repeat_ngram,
                active=wanted,
            )  # fmt: skip
            texts = self._written(session, wanted, steps)
            heard = session.heard()
            for row, (tokens, counted) in texts.items():
                text = self._text(tokens)
                attempts[row] = Attempt(
                    tuple(tokens), text, float(heard.log_probability[row]) / counted,
                    compression_ratio(text), float(heard.no_speech[row]), temperature,
                )  # fmt: skip
                wanted[row] = options.thresholds.failed(attempts[row])
            if not any(wanted):
                break
        return [attempts[row] for row in range(count)]

    def _written(
        self, session: SpeechSession, wanted: Sequence[bool], steps: int
    ) -> dict[int, tuple[Ids, int]]:
        """Tokens of each wanted row, without the end, and how many the sums are of."""
        texts: dict[int, tuple[Ids, int]] = {row: ([], 0) for row, on in enumerate(wanted) if on}
        open_rows = set(texts)
        with closing(session.run(steps)) as running:
            for tokens in running:
                for row in list(open_rows):
                    text, token = texts[row][0], int(tokens[row])
                    if token != self._vocabulary.end:
                        text.append(token)
                    most = self._options.max_repeats
                    texts[row] = (text, texts[row][1] + 1)
                    if token == self._vocabulary.end or (most and repeats(text, most)):
                        open_rows.remove(row)
                if not open_rows:
                    break
        return texts

    def _told(
        self, session: SpeechSession, row: int, window: Window, attempt: Attempt,
        cuts: Sequence[Cut],
    ) -> Iterator[Segment]:  # fmt: skip
        """Segments of a window, at their times in the recording."""
        timing = self._timing(session, row, window, attempt)
        for piece in cuts:
            start, end = (
                min(t * FRAMES_A_STEP, window.frames) + window.start
                for t in (piece.start, piece.end)
            )
            yield Segment(
                start / 100, end / 100, self._text(piece.tokens), timing(piece) if timing else (),
                tuple(t for t in piece.tokens if t < self._vocabulary.end), attempt.avg_logprob,
                attempt.compression_ratio, attempt.no_speech_prob, attempt.temperature,
            )  # fmt: skip

    def _with_text(self, cuts: Sequence[Cut]) -> list[Cut]:
        """Segments without those that are blank or have no length."""
        timed = self._options.timestamps != "none"
        return [
            piece for piece in cuts
            if self._text(piece.tokens).strip() and not (timed and piece.start == piece.end)
        ]  # fmt: skip

    def _remember(self, attempt: Attempt, cuts: Sequence[Cut]) -> None:
        """What the next window is told."""
        self._before += [token for piece in cuts for token in piece.tokens]
        if not self._options.condition_on_previous_text or attempt.temperature > HOT:
            self._before = []

    def _timing(
        self, session: SpeechSession, row: int, window: Window, attempt: Attempt
    ) -> Callable[[Cut], tuple[Word, ...]] | None:
        """Gives words of segments; None where their times are not wanted."""
        if self._options.timestamps != "word" or not attempt.tokens:
            return None
        config, v = self._transcriber.model.config, self._vocabulary
        prompt, _ = self._prompt()
        weights, sure = session.aligned(
            row, prompt, attempt.tokens, self._transcriber.config.alignment_heads
        )
        places = max(window.frames // FRAMES_A_STEP, 1)
        ends = token_ends(weights[..., :places], config.median_filter_width)
        seconds = window.start / 100 + np.concatenate([[0], ends]) * STEP

        def timed(piece: Cut) -> tuple[Word, ...]:
            at = [piece.at + i for i, token in enumerate(piece.tokens) if token < v.end]
            if not at:
                return ()
            return words(
                [attempt.tokens[i] for i in at], [float(seconds[i + 1]) for i in at],
                [float(sure[i]) for i in at], float(seconds[at[0]]), self._text, self.language,
            )  # fmt: skip

        return timed

    def _text(self, tokens: Sequence[int]) -> str:
        return self._transcriber.tokenizer.decode([t for t in tokens if t < self._vocabulary.end])

    def _ids(self, text: str | None) -> Ids:
        """Tokens of a text that stands before a window's."""
        if not text or not text.strip():
            return []
        (ids,) = self._transcriber.tokenizer.encode([" " + text.strip()])
        return [i for i in ids if i < self._vocabulary.end]


def _all(tokens: Sequence[int], first_time: int, frames: int) -> list[Cut]:
    """A window's text as one segment, whatever times are in it."""
    return [Cut(0, frames // FRAMES_A_STEP, tuple(tokens), 0)]


def _groups(windows: Iterable[Window], size: int) -> Iterator[list[Window]]:
    group: list[Window] = []
    for window in windows:
        group.append(window)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def read_transcriber(folder: Path, vocab_size: int) -> Callable[[WhisperModel], Transcriber]:
    """Read what a Transcriber has beside its model, which the function returned takes.

    Raises:
        WeightsError: a file that is malformed.
        MissingExtraError: the folder has a tokenizer, and its library is not installed.
    """
    from centella.tasks.text import Tokenizer

    file = folder / TOKENIZER
    if kind(file) == "nothing at that path":
        return partial(
            Transcriber, tokenizer=file, config=SpeechConfig.from_folder(folder, vocab_size, {})
        )
    tokenizer = Tokenizer.from_folder(folder, vocab_size)
    added = tokenizer.native.get_added_tokens_decoder()
    named = {token.content: i for i, token in added.items()}
    config = SpeechConfig.from_folder(folder, vocab_size, named)
    return partial(Transcriber, tokenizer=tokenizer, config=config)
