"""`Transcription`: a recording to segments, window after window or many windows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Generator as Pieces
from contextlib import closing
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import islice
from typing import TYPE_CHECKING, Self

import numpy as np
from msgspec import Struct

from centella.audio.transcript import Segment, Word
from centella.tasks.transcribe.align import token_ends, words
from centella.tasks.transcribe.beams import Beams
from centella.tasks.transcribe.options import Options
from centella.tasks.transcribe.recording import Recording, Window
from centella.tasks.transcribe.rules import Vocabulary
from centella.tasks.transcribe.session import Array, SpeechSession
from centella.tasks.transcribe.windows import (
    FRAMES_A_STEP,
    STEP,
    Attempt,
    Cut,
    compression_ratio,
    cut,
    cut_all,
    repeats,
)  # fmt: skip

if TYPE_CHECKING:
    from centella.tasks.transcribe.transcriber import Transcriber

Ids = list[int]
Aligned = tuple[Array, Array]  # attention and probabilities of a text, as `SpeechSession.aligned`
Progress = Callable[[float, float], object]
BATCH = 8  # windows at once, of files longer than one whose regions of speech are found
REST = 50  # frames: less of a region after its last segment is what was added to its speech
HOT = 0.5  # a text above this temperature is not told to the next window


class Decoding(Struct, frozen=True, eq=False):
    """A session, and what follows several texts of its windows; None: one text is followed."""

    session: SpeechSession
    beams: Beams | None = None


class Transcription(Iterator[Segment]):
    """A transcription in progress: an iterator over segments; `with` closes it.

    A loop that is left early closes it too, unless somebody holds it.
    """

    def __init__(
        self, transcriber: Transcriber, recording: Recording, options: Options,
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        self._work = _Work(transcriber, recording, options, progress)
        self._recording = recording
        self._segments: Pieces[Segment] = self._work.segments()

    def __repr__(self) -> str:
        done = getgeneratorstate(self._segments) == GEN_CLOSED
        return f"<Transcription of {self.duration:.1f} s, {'done' if done else 'under way'}>"

    def __iter__(self) -> Iterator[Segment]:
        return self

    def __next__(self) -> Segment:
        """The next segment, when its window is done."""
        return next(self._segments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End it here; the file is closed.

        Also from another thread than the one that waits for a segment: that one gets no more, after
        at most a step of the text of its window.
        """
        self._work.ended = True
        try:
            self._segments.close()
        except ValueError:  # another thread is in it, and closes the file when it leaves
            return
        self._recording.stream.close()

    @property
    def language(self) -> str | None:
        """A code, known after the first window; None if the model has only one language."""
        return self._work.language

    @property
    def duration(self) -> float:
        """Seconds of the recording, as far as they are known."""
        return self._recording.duration


class _ClosedError(Exception):
    """It was closed by a thread that does not iterate."""


class _Work:
    """What a Transcription does; it knows no Transcription, so that one nobody holds is closed."""

    def __init__(
        self, transcriber: Transcriber, recording: Recording, options: Options,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        self._transcriber, self._recording, self._options = transcriber, recording, options
        self._vocabulary: Vocabulary = transcriber.config.vocabulary
        self._progress = progress
        self.language: str | None = options.language
        self.ended: bool = False
        self._before: Ids = self._ids(options.prompt)
        self._hot: Ids = self._ids(options.hotwords)

    # -- the loops --------------------------------------------------------------------------------

    def segments(self) -> Pieces[Segment]:
        """Segments, with a session of its own while it runs; then what ended the recording early.

        Raises:
            Exception: what reading it raised.
        """
        known = self._recording.stream.duration or 0.0  # of a microphone nothing is known
        several = known * 100 > self._recording.frames and not self._recording.everything
        batch = self._options.batch or (BATCH if several else 1)
        with closing(self._recording.stream):
            decoding = self._transcriber.take(batch, self._options.beam)
            try:
                yield from (self._one_by_one if batch == 1 else self._together)(decoding)
            except GeneratorExit:  # the caller has what it wants
                self._transcriber.give(decoding)
                raise
            except _ClosedError:
                self._transcriber.give(decoding)
                return
            except BaseException:
                self._transcriber.drop(decoding)
                raise
            self._transcriber.give(decoding)
            if self._recording.fault is not None:
                raise self._recording.fault

    def _one_by_one(self, decoding: Decoding) -> Iterator[Segment]:
        """Each window begins where the last segment of the one before ends."""
        at, timed, session = 0, self._options.timestamps != "none", decoding.session
        while (window := self._recording.next_window(at)) is not None:
            self._listen(session, [window])
            (attempt,) = self._attempts(decoding, 1)
            step = window.frames
            if not self._options.thresholds.silent(attempt):
                first_time = self._vocabulary.first_time
                cuts = _all(attempt.tokens, window.frames)
                if timed:
                    cuts, step = cut(attempt.tokens, first_time, window.frames)
                    if self._recording.by_region and window.frames - step < REST:
                        step = window.frames
                        cuts = cut_all(attempt.tokens, first_time, step)
                cuts = self._with_text(cuts, window)
                aligned = next(self._aligned(session, {0: attempt.tokens}))
                yield from self._told(window, attempt, cuts, aligned)
                self._remember(attempt, cuts)
            at = window.start + max(step, FRAMES_A_STEP)
            self._tell(at)

    def _together(self, decoding: Decoding) -> Iterator[Segment]:
        """Several windows at a time; none knows the text of another."""
        session, windows = decoding.session, self._recording.parts()
        while group := self._listen(session, islice(windows, session.batch)):
            attempts = self._attempts(decoding, len(group))
            silent = self._options.thresholds.silent
            texts = {row: a.tokens for row, a in enumerate(attempts) if not silent(a)}
            aligned = self._aligned(session, texts)
            for row, (window, attempt) in enumerate(zip(group, attempts, strict=True)):
                if row in texts:
                    timed = self._options.timestamps != "none"
                    cuts = (
                        cut_all(attempt.tokens, self._vocabulary.first_time, window.frames)
                        if timed
                        else _all(attempt.tokens, window.frames)
                    )
                    cuts = self._with_text(cuts, window)
                    yield from self._told(window, attempt, cuts, next(aligned))
                self._tell(window.start + window.frames)

    def _go_on(self) -> None:
        if self.ended:
            raise _ClosedError

    def _tell(self, frames: int) -> None:
        self._go_on()
        if self._progress is not None:
            total = self._recording.duration
            self._progress(min(frames / 100, total), total)

    # -- a window ---------------------------------------------------------------------------------

    def _listen(self, session: SpeechSession, windows: Iterable[Window]) -> list[Window]:
        """Encode windows, each when it is there; the first ones say the language."""
        heard = list[Window]()
        for row, window in enumerate(windows):
            self._go_on()
            session.listen(self._recording.row(window), row)
            heard.append(window)
        names = list(self._vocabulary.languages)
        if heard and names and self.language is None:
            self.language = names[int(session.languages()[0].argmax())]
        return heard

    def _prompt(self) -> tuple[Ids, int]:
        """What a window's text follows, and where the transcript begins in it."""
        v, options = self._vocabulary, self._options
        begin = [v.start]
        if self.language is not None and self.language in v.languages:
            begin += [v.languages[self.language]]
            begin += [v.tasks[options.task]] if options.task in v.tasks else []
        begin += [v.no_timestamps] * (options.timestamps == "none")
        room = self._transcriber.model.config.max_target_positions // 2 - 1
        hot = self._hot[:room]
        before = hot + self._before[max(0, len(self._before) - (room - len(hot))) :]
        lead = [v.previous, *before] if before else []
        return lead + begin, len(lead)

    def _attempts(self, decoding: Decoding, count: int) -> list[Attempt]:
        """Texts of the first `count` windows, at the first temperature that gives one believed."""
        wanted = [row < count for row in range(decoding.session.batch)]
        attempts: dict[int, Attempt] = {}
        for temperature in self._options.temperature:
            decoded, no_speech = self._decoded(decoding, wanted, temperature)
            for row, (tokens, mean) in decoded.items():
                text = self._text(tokens)
                attempts[row] = Attempt(
                    tuple(tokens), text, mean, compression_ratio(text), float(no_speech[row]),
                    temperature,
                )  # fmt: skip
                wanted[row] = self._options.thresholds.failed(attempts[row])
            if not any(wanted):
                break
        return [attempts[row] for row in range(count)]

    def _decoded(
        self, decoding: Decoding, wanted: Sequence[bool], temperature: float
    ) -> tuple[dict[int, tuple[Ids, float]], Array]:
        """Tokens of each wanted row, without the end, and their mean log-probability.

        And the probability that nobody speaks, [batch].
        """
        options, (prompt, begin) = self._options, self._prompt()
        most = self._transcriber.model.config.max_target_positions
        steps = min(options.max_new_tokens or most // 2, most - len(prompt))
        timed, session = options.timestamps != "none", decoding.session
        if decoding.beams is not None and temperature == 0.0:
            written = decoding.beams.write(
                prompt, begin, steps, timed=timed, no_repeat=options.no_repeat_ngram,
                active=wanted, meanwhile=self._meanwhile(session),
            )  # fmt: skip
            return written, session.heard().no_speech
        session.start(
            [prompt] * session.batch, begin, timed=timed, temperature=temperature,
            seed=options.seed, no_repeat=options.no_repeat_ngram, active=wanted,
        )  # fmt: skip
        texts = self._written(session, wanted, steps)
        heard = session.heard()
        sums = heard.log_probability
        means = {row: (text, float(sums[row]) / n) for row, (text, n) in texts.items()}
        return means, heard.no_speech

    def _meanwhile(self, session: SpeechSession) -> Callable[[], None]:
        """What the host does while the device works: a block of the next batch, and a window."""
        return partial(self._recording.read_ahead, session.batch + 1)

    def _written(
        self, session: SpeechSession, wanted: Sequence[bool], steps: int
    ) -> dict[int, tuple[Ids, int]]:
        """Tokens of each wanted row, without the end, and how many the sums are of."""
        end, most = self._vocabulary.end, self._options.max_repeats
        texts: dict[int, tuple[Ids, int]] = {row: ([], 0) for row, on in enumerate(wanted) if on}
        left = set(texts)
        with closing(session.run(steps, self._meanwhile(session), left)) as running:
            for tokens in running:
                self._go_on()
                for row in list(left):
                    (text, count), token = texts[row], int(tokens[row])
                    text += [token] * (token != end)
                    texts[row] = (text, count + 1)
                    if token == end or (most and repeats(text, most)):
                        left.remove(row)
                        if token != end and left:
                            session.end(row)
                if not left:
                    break
        return texts

    def _told(
        self, window: Window, attempt: Attempt, cuts: Sequence[Cut], aligned: Aligned | None
    ) -> Iterator[Segment]:
        """Segments of a window, at their times in the recording."""
        timing = None if aligned is None else self._timing(window, attempt, aligned)
        for piece in cuts:
            start, end = ((frame + window.start) / 100 for frame in _bounds(piece, window))
            yield Segment(
                start, end, self._text(piece.tokens), timing(piece) if timing else (),
                tuple(t for t in piece.tokens if t < self._vocabulary.end), attempt.avg_logprob,
                attempt.compression_ratio, attempt.no_speech_prob, attempt.temperature,
            )  # fmt: skip

    def _with_text(self, cuts: Sequence[Cut], window: Window) -> list[Cut]:
        """Segments without those that are blank or have no length within the sound."""

        def lasts(piece: Cut) -> bool:
            start, end = _bounds(piece, window)
            return start < end

        return [piece for piece in cuts if self._text(piece.tokens).strip() and lasts(piece)]

    def _remember(self, attempt: Attempt, cuts: Sequence[Cut]) -> None:
        """What the next window is told."""
        self._before += [token for piece in cuts for token in piece.tokens]
        if not self._options.condition_on_previous_text or attempt.temperature > HOT:
            self._before = []

    def _aligned(
        self, session: SpeechSession, texts: Mapping[int, Sequence[int]]
    ) -> Iterator[Aligned | None]:
        """Where tokens of each text are in the sound; None where no times of words are wanted.

        Some texts are aligned together, as they are asked for: what there is of all takes GB.
        """
        heads, (prompt, _) = self._transcriber.config.alignment_heads, self._prompt()
        words = self._options.timestamps == "word"
        some = {row: tokens for row, tokens in texts.items() if tokens and words}
        coming = session.aligned(prompt, some, heads)
        for row in texts:
            yield next(coming)[1:] if row in some else None

    def _timing(
        self, window: Window, attempt: Attempt, aligned: Aligned
    ) -> Callable[[Cut], tuple[Word, ...]]:
        """Gives words of segments."""
        config, v, (weights, sure) = self._transcriber.model.config, self._vocabulary, aligned
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


def _all(tokens: Sequence[int], frames: int) -> list[Cut]:
    """A window's text as one segment, whatever times are in it."""
    return [Cut(0, -(-frames // FRAMES_A_STEP), tuple(tokens), 0)]


def _bounds(piece: Cut, window: Window) -> tuple[int, int]:
    """Frames of a window's sound that a segment begins and ends with."""
    return (
        min(piece.start * FRAMES_A_STEP, window.frames),
        min(piece.end * FRAMES_A_STEP, window.frames),
    )
