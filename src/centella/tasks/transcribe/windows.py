"""What the host makes of a window's tokens: segments, where to go on, whether to try again."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from msgspec import Struct

Ids = list[int]
STEP = 0.02  # seconds between tokens of time
FRAMES_A_STEP = 2  # of a spectrogram
SHORTEST = 1e-10  # of a compressed text: nothing is divided by 0
LONGEST = 8  # tokens that are repeated


class Cut(Struct, frozen=True):
    """A segment of a window.

    Attributes:
        start, end: in steps of 20 ms from the window's begin.
        tokens: those of its text and of its times.
        at: index of its first token in the window's text.
    """

    start: int
    end: int
    tokens: tuple[int, ...]
    at: int


class Attempt(Struct, frozen=True):
    """A text of a window, and how sure the model is of it.

    Attributes:
        tokens: without the one that ends it.
        text: without times; avg_logprob: mean logarithm of the tokens' probabilities.
        compression_ratio: bytes of the text over those that zlib needs.
        no_speech_prob: before the first token; temperature: that it was sampled at.
    """

    tokens: tuple[int, ...]
    text: str
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    temperature: float


class Thresholds(Struct, frozen=True):
    """When a text is not believed; None: never for that reason.

    Attributes:
        compression_ratio: a larger one, and the text repeats itself.
        logprob: a mean below it, and the model guesses.
        no_speech: a larger probability, with a mean below `logprob`, and nobody speaks.
    """

    compression_ratio: float | None = 2.4
    logprob: float | None = -1.0
    no_speech: float | None = 0.6

    def silent(self, attempt: Attempt) -> bool:
        """Whether nobody speaks in the window."""
        unsure = self.logprob is None or attempt.avg_logprob < self.logprob
        return self.no_speech is not None and attempt.no_speech_prob > self.no_speech and unsure

    def failed(self, attempt: Attempt) -> bool:
        """Whether to try again at a higher temperature."""
        repeats = (
            self.compression_ratio is not None
            and attempt.compression_ratio > self.compression_ratio
        )
        unsure = self.logprob is not None and attempt.avg_logprob < self.logprob
        return (repeats or unsure) and not self.silent(attempt)


def compression_ratio(text: str) -> float:
    """Bytes of a text over those that zlib needs: above 2.4 it mostly repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def cut(tokens: Sequence[int], first_time: int, frames: int) -> tuple[list[Cut], int]:
    """Segments of a window's text, and how many frames further the next window begins.

    Two times beside each other are the end of a segment and the start of the next one. A text that
    ends with a pair is cut off there, and the next window begins at that time; otherwise all of the
    window is done.

    Args:
        tokens: without the end; first_time: the token of the time 0.
        frames: of the window that have sound.

    Source: `whisper/transcribe.py` of the published implementation, as the paper describes it.
    """
    times = [token >= first_time for token in tokens]
    ends = [i for i in range(1, len(tokens)) if times[i] and times[i - 1]]
    if not ends:
        return [whole(tokens, first_time, frames)], frames
    one_at_end = times[-2:] == [False, True]
    slices = [*ends, len(tokens)] if one_at_end else ends
    cuts, at = [], 0
    for end in slices:
        some = tuple(tokens[at:end])
        cuts.append(Cut(some[0] - first_time, some[-1] - first_time, some, at))
        at = end
    if one_at_end:
        return cuts, frames
    return cuts, (tokens[at - 1] - first_time) * FRAMES_A_STEP


def whole(tokens: Sequence[int], first_time: int, frames: int, at: int = 0) -> Cut:
    """All tokens from one on as a segment, which ends at its last time or with the window."""
    some = tuple(tokens[at:])
    times = [token - first_time for token in some if token >= first_time]
    start = times[0] if at and times else 0
    last = times[-1] if times and times[-1] > start else -(-frames // FRAMES_A_STEP)
    return Cut(start, max(last, start), some, at)


def cut_all(tokens: Sequence[int], first_time: int, frames: int) -> list[Cut]:
    """`cut` for a window that no other follows: what comes after the last pair is a segment too."""
    cuts, step = cut(tokens, first_time, frames)
    rest = cuts[-1].at + len(cuts[-1].tokens)
    if step != frames and any(token < first_time for token in tokens[rest:]):
        cuts.append(whole(tokens, first_time, frames, rest))
    return cuts


def repeats(tokens: Ids, times: int) -> bool:
    """Whether a text ends with the same tokens, up to LONGEST of them, so many times over."""
    return any(
        len(tokens) >= n * times and tokens[-n * times :] == tokens[-n:] * times
        for n in range(1, LONGEST + 1)
    )
