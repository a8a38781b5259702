"""What a speech model gives: segments of text with their times, and the words of a segment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct


class Word(Struct, frozen=True):
    """A word of a segment.

    Attributes:
        start: seconds from the beginning of the audio.
        end: the same.
        text: as the tokens spell it, with the space before it.
        probability: mean probability of its tokens, 0 to 1.
    """

    start: float
    end: float
    text: str
    probability: float


class Segment(Struct, frozen=True, omit_defaults=True):
    """A piece of a transcript; what the model did not say about it is None.

    Attributes:
        start: seconds from the beginning of the audio.
        end: the same.
        text: as the tokens spell it, with the space before it.
        words: its words in order; none where word times were not asked for.
        tokens: ids, without those of times.
        avg_logprob: mean logarithm of the probabilities of its tokens.
        compression_ratio: bytes of the text over bytes of the text compressed by zlib.
        no_speech_prob: probability of the token for no speech, 0 to 1.
        temperature: that its tokens were sampled at.
    """

    start: float
    end: float
    text: str
    words: tuple[Word, ...] = ()
    tokens: tuple[int, ...] = ()
    avg_logprob: float | None = None
    compression_ratio: float | None = None
    no_speech_prob: float | None = None
    temperature: float | None = None


def by_word(segments: Iterable[Segment]) -> Iterator[Segment]:
    """A segment for each word, for subtitles that show one at a time; one without words stays."""
    for segment in segments:
        if not segment.words:
            yield segment
        for word in segment.words:
            yield Segment(word.start, word.end, word.text)
