"""Run what README.md and docs/*.md show: python blocks, and `centella` command lines.

Blocks of one file run in order in one namespace, as a reader would type them. Of console and bash
blocks only the lines that start with `centella` run. A line `<!-- no-run -->` right before a block
skips it.

    python tests/support/run_snippets.py [FILE ...]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w+-]*)")
NO_RUN = "<!-- no-run -->"
TIMEOUT = 900  # seconds a command: only a hang takes so long


@dataclass(frozen=True)
class Block:
    """A fenced block: where its code starts (line, from 1), its language and text."""

    line: int
    language: str
    text: str
    skipped: bool


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a Markdown text, in order."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        opening = FENCE.match(lines[at])
        if not opening:
            at += 1
            continue
        start, indent = at + 1, len(opening["indent"])
        at = start
        while at < len(lines) and lines[at].strip() != opening["ticks"]:
            at += 1
        code = "\n".join(line[indent:] for line in lines[start:at])
        skipped = start > 1 and lines[start - 2].strip() == NO_RUN
        yield Block(start + 1, opening["language"], code, skipped)
        at += 1


def commands(text: str) -> Iterator[str]:
    """The command lines of a console or bash block that start with `centella`."""
    for line in text.replace("\\\n", " ").splitlines():
        command = line.strip().removeprefix("$ ")
        if command.split(maxsplit=1)[:1] == ["centella"]:
            yield command


def run_python(block: Block, path: Path, module: ModuleType) -> None:
    """Execute a block so that tracebacks name the Markdown file and its line."""
    source = "\n" * (block.line - 1) + block.text
    exec(compile(source, str(path), "exec"), module.__dict__)


def run_command(command: str) -> None:
    """Run one command line, with the `centella` of this interpreter first on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path}
    subprocess.run(command, shell=True, check=True, cwd=ROOT, env=environment, timeout=TIMEOUT)


def run_file(path: Path) -> tuple[int, int]:
    """Run a file's blocks; returns how many pieces ran and how many blocks were skipped."""
    ran = skipped = 0
    module = ModuleType("__main__")
    sys.modules["__main__"] = module  # where pickle and typing look for what a block defines
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.language not in ("python", "console", "bash"):
            continue
        if block.skipped:
            skipped += 1
            continue
        started = time.perf_counter()
        print(f"{path.name}:{block.line} {block.language}", flush=True)
        if block.language == "python":
            run_python(block, path, module)
            ran += 1
        for command in commands(block.text) if block.language != "python" else ():
            print(f"$ {command}", flush=True)
            run_command(command)
            ran += 1
        print(f"    {time.perf_counter() - started:.1f} s", flush=True)
    return ran, skipped


def main(arguments: list[str]) -> int:
    """Run every file to its first failure; returns the exit status."""
    default = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    ran = skipped = failed = 0
    for path in [Path(a) for a in arguments] or default:
        try:
            counts = run_file(path)
        except Exception:
            traceback.print_exc()
            failed += 1
        else:
            ran, skipped = ran + counts[0], skipped + counts[1]
    print(f"snippets: {ran} ran, {skipped} blocks marked no-run, {failed} files failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
