"""Formats of transcripts: each whole, and the texts and times that break careless writers."""

from __future__ import annotations

import json

import pytest

from centella.audio.subtitles import format_transcript
from centella.audio.transcript import Segment, Word, by_word
from centella.errors import AudioError

HELLO = Segment(
    0.0,
    1.2345,
    " Hello <you> & me",
    words=(Word(0.0, 0.5, " Hello", 0.9), Word(0.5, 1.2, " you", 1)),
)
LATE = Segment(3599.9996, 360000.5, " a --> b\n\n1\n")
SEGMENTS = [HELLO, Segment(1.5, 2.0, " \n "), LATE]


def written(name: str, segments: list[Segment]) -> str:
    return "".join(format_transcript(segments, name))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("text", "Hello <you> & me\na --> b 1\n"),
        (
            "srt",
            "1\n00:00:00,000 --> 00:00:01,234\nHello <you> & me\n\n"
            "2\n01:00:00,000 --> 100:00:00,500\na -> b 1\n\n",
        ),
        (
            "vtt",
            "WEBVTT\n\n00:00:00.000 --> 00:00:01.234\nHello &lt;you&gt; &amp; me\n\n"
            "01:00:00.000 --> 100:00:00.500\na --&gt; b 1\n\n",
        ),
        ("tsv", "start\tend\ttext\n0\t1234\tHello <you> & me\n3600000\t360000500\ta --> b 1\n"),
    ],
)
def test_a_format_whole(name: str, expected: str) -> None:
    assert written(name, SEGMENTS) == expected


def test_json_keeps_segments_whole() -> None:
    said = json.loads(written("json", [*SEGMENTS, Segment(1.0, 2.0, "\x07\ud800", tokens=(1, 2))]))
    assert said["text"] == "Hello <you> & me \n  a --> b\n\n1\n\x07\ufffd"
    assert said["segments"][0]["words"][1] == {
        "start": 0.5, "end": 1.2, "text": " you", "probability": 1.0,
    }  # fmt: skip
    assert said["segments"][1] == {"start": 1.5, "end": 2.0, "text": " \n "}
    assert said["segments"][3]["tokens"] == [1, 2]
    assert json.loads(written("json", [])) == {"segments": [], "text": ""}


def test_words_as_segments() -> None:
    assert [s.text for s in by_word(SEGMENTS)] == [" Hello", " you", " \n ", LATE.text]


@pytest.mark.parametrize("name", ["text", "srt", "vtt", "tsv"])
def test_a_text_is_one_line_without_control_characters(name: str) -> None:
    odd = "a\tb\r\nc\x1b[31m\x00d\u2028e\x85f\u200dg \ud83d\ude00 \ud800"
    assert "a b c[31md e f\u200dg \U0001f600 \ufffd\n" in written(name, [Segment(0, 1, odd)])


def test_a_cue_ends_after_it_starts_and_none_is_before_0() -> None:
    assert written("tsv", [Segment(-0.2, -0.1, "a"), Segment(2.0, 1.0, "b")]).splitlines()[1:] == [
        "0\t1\ta", "2000\t2001\tb",
    ]  # fmt: skip


def test_another_format_is_refused() -> None:
    with pytest.raises(AudioError, match="expected one of text, srt, vtt, tsv, json, got 'ass'"):
        format_transcript(SEGMENTS, "ass")
