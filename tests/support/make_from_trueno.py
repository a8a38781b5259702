"""Write the tables of names on docs/from-trueno.md, from the table that the tests run.

python tests/support/make_from_trueno.py          # changes the page
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.seed_surface import ROWS, THEIRS, Row  # noqa: E402  # on the path by now

PAGE = ROOT / "docs" / "from-trueno.md"
KINDS = {"webgpu": "WebGPU", "cuda": "CUDA"}


def line_of(row: Row) -> str:
    """A name as a line of a table."""
    notes = [row.note] * bool(row.note) + [f"on {KINDS[row.only]} only" for _ in row.only[:1]]
    return f"| `{row.name}` | `{row.ours}` | {'; '.join(notes)} |"


def page(text: str) -> str:
    """The page with each table of names as it is to be; everything else stays."""
    rows = {(row.owner, row.name): row for row in ROWS}
    for owner, names in THEIRS.items():
        heading = f"### `{owner}`" if owner else "### Functions and types"
        table = "".join(f"{line_of(rows[owner, name])}\n" for name in names.split())
        below = rf"(\n{re.escape(heading)}\n.*?\n\|---\|---\|---\|\n)(?:\|[^\n]*\n)+"
        text, changed = re.subn(below, lambda m, t=table: m[1] + t, text, flags=re.DOTALL)
        assert changed == 1, heading
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
