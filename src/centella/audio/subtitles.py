"""Transcripts as text: plain, SRT, WebVTT, TSV, JSON.

A format is a function of segments that yields text piece by piece, so a transcript is written as it
is recognised. Times are rounded to milliseconds. But for JSON, which keeps segments whole, a text
is one line: white space is one space, control characters go, and a segment without text is left
out. Sources: SubRip's files as players read them; WebVTT, W3C Candidate Recommendation 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType

import msgspec

from centella.audio.transcript import Segment, Word
from centella.errors import AudioError

Segments = Iterable[Segment]
CONTROLS = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0)))  # all of Unicode


def text(segments: Segments) -> Iterator[str]:
    """A line for each segment."""
    return (f"{line}\n" for _, _, line in _cues(segments))


def srt(segments: Segments) -> Iterator[str]:
    """SubRip cues, numbered from 1; `-->` in a text would be read as times and becomes `->`."""
    for number, (start, end, line) in enumerate(_cues(segments), 1):
        times = f"{_clock(start, ',')} --> {_clock(end, ',')}"
        yield f"{number}\n{times}\n{line.replace('-->', '->')}\n\n"


def vtt(segments: Segments) -> Iterator[str]:
    """WebVTT cues; `&`, `<` and `>` are written as entities."""
    yield "WEBVTT\n\n"
    for start, end, line in _cues(segments):
        safe = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        yield f"{_clock(start, '.')} --> {_clock(end, '.')}\n{safe}\n\n"


def tsv(segments: Segments) -> Iterator[str]:
    """Start and end in milliseconds and the text, separated by tabs; first a line of names."""
    yield "start\tend\ttext\n"
    for start, end, line in _cues(segments):
        yield f"{start}\t{end}\t{line}\n"


def json(segments: Segments) -> Iterator[str]:
    """One object: `text`, and `segments` with every field that is set; times in seconds."""
    texts: list[str] = []
    yield '{"segments":['
    for segment in segments:
        words = tuple(
            Word(w.start, w.end, _encodable(w.text), w.probability) for w in segment.words
        )
        whole = msgspec.structs.replace(segment, text=_encodable(segment.text), words=words)
        yield ("," if texts else "") + "\n" + msgspec.json.encode(whole).decode()
        texts.append(whole.text)
    yield '\n],"text":' + msgspec.json.encode("".join(texts).strip()).decode() + "}\n"


FORMATS: MappingProxyType[str, Callable[[Segments], Iterator[str]]] = MappingProxyType(
    {"text": text, "srt": srt, "vtt": vtt, "tsv": tsv, "json": json}
)


def format_transcript(segments: Segments, format: str = "text") -> Iterator[str]:
    """A transcript in a format, in pieces: each is given as soon as its segment is.

    Args:
        segments: in order; `by_word(segments)` for subtitles of single words.
        format: "text" (a line a segment), "srt", "vtt" (WebVTT), "tsv" (start and end in
            milliseconds, text) or "json" (`segments` with every field that is set, and `text`).

    Raises:
        AudioError: another format.
    """
    if format not in FORMATS:
        expected = ", ".join(FORMATS)
        raise AudioError(f"format_transcript: expected one of {expected}, got {format!r}")
    return FORMATS[format](segments)


def _cues(segments: Segments) -> Iterator[tuple[int, int, str]]:
    """Start and end in milliseconds, at least one apart and none below 0, and the line of text."""
    for segment in segments:
        line = _line(segment.text)
        if line:
            start = max(round(1000 * segment.start), 0)
            yield start, max(round(1000 * segment.end), start + 1), line


def _line(line: str) -> str:
    """One line without control characters; characters that only format (joiners) stay."""
    spaced = " ".join(line.split())
    return _encodable(spaced).translate(CONTROLS).strip()


def _encodable(line: str) -> str:
    """The text with U+FFFD in place of halves of surrogate pairs, which UTF-8 cannot hold."""
    return line.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _clock(ms: int, point: str) -> str:
    """HH:MM:SS.mmm; hours may be above 99."""
    seconds, ms = divmod(ms, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{ms:03}"
