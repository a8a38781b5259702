"""Pages that are held to their word: each sentence of one names the tests that show it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1]


def sentences(page: str) -> list[str]:
    """The sentences and table rows of a Markdown text, without its headings."""
    said: list[str] = []
    paragraph = ""
    for line in [*page.splitlines(), ""]:
        if line.startswith("|"):
            said += [line] * bool(set(line) - set("|-"))
        elif not line or line.startswith(("#", "- ")):
            said += re.split(r"(?<=\.) (?=[A-Z`])", paragraph) if paragraph else []
            paragraph = ""
        if line and line[0] not in "#|":
            paragraph = f"{paragraph} {line.removeprefix('- ').strip()}".strip()
    return said


def assert_shown(said: Sequence[str], shown: Mapping[str, str], prefix: str = "") -> None:
    """Fail unless each sentence has one row of `shown`, each row a sentence, each test a body.

    Args:
        shown: the start of a sentence to its tests: `file.name` is `test_name` in
            tests/test_(prefix)(file).py.
    """
    for sentence in said:
        assert sum(sentence.startswith(start) for start in shown) == 1, sentence
    for start, tests in shown.items():
        assert sum(s.startswith(start) for s in said) == 1, start
        assert tests.split(), start
        for name in tests.split():
            file, test = name.split(".")
            source = next(TESTS.rglob(f"test_{prefix}{file}.py")).read_text("utf-8")
            assert f"def test_{test}(" in source, name
