"""README's picture: MiniLM's rates of a committed run, as bars.

python benchmarks/picture.py        # writes docs/minilm.svg from results/h200-minilm.json
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = ROOT / "benchmarks" / "results" / "h200-minilm.json"
PICTURE = ROOT / "docs" / "minilm.svg"
GROUPS = (("MiniLM f16", "f16, 512 x 128 tokens"), ("MiniLM f32", "f32, 512 x 128 tokens"))
BARS = (
    ("cuda", "centella, CUDA", "#0a7d55"),
    ("webgpu", "centella, WebGPU", "#5fc4a0"),
    ("transformers", "transformers, CUDA", "#9a9a9a"),
)
WIDTH, LEFT, BAR, GAP = 680, 150, 20, 34
ROOM = WIDTH - LEFT - 90  # for the longest bar


def picture(run: Path = RUN) -> str:
    """The text of the picture."""
    read = json.loads(run.read_text("utf-8"))
    rows = {(r["bench"], r["who"]): r["rate"] for r in read["rows"] if r["shape"] == [512, 128]}
    most = max(rows[bench, who] for bench, _ in GROUPS for who, _, _ in BARS)
    lines: list[str] = []
    y = 12
    for bench, title in GROUPS:
        lines.append(f'<text x="4" y="{y + 10}" font-weight="bold">{title}</text>')
        y += 20
        for who, label, colour in BARS:
            rate = rows[bench, who]
            width = max(1, round(ROOM * rate / most))
            text = f"{round(rate, -2):,.0f}/s".replace(",", " ")
            lines.append(f'<text x="{LEFT - 6}" y="{y + 14}" text-anchor="end">{label}</text>')
            lines.append(
                f'<rect x="{LEFT}" y="{y}" width="{width}" height="{BAR}" fill="{colour}"/>'
            )
            lines.append(f'<text x="{LEFT + width + 6}" y="{y + 14}">{text}</text>')
            y += BAR + 4
        y += GAP - BAR
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}"'
    style = 'font-family="sans-serif" font-size="12" fill="#333"'
    back = f'<rect width="{WIDTH}" height="{y}" fill="white"/>'
    return "\n".join([f"{head} {style}>", back, *lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"wrote {PICTURE}")
