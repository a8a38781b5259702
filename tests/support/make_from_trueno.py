"""Make docs/from-trueno.md of the tables that the tests run.

python tests/support/make_from_trueno.py          # writes the page
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.seed_faults import FAULTS  # noqa: E402  # found once the root is on the path
from tests.support.seed_surface import ROWS, THEIRS, Row  # noqa: E402

PAGE = ROOT / "docs" / "from-trueno.md"

INTRO = """\
# From trueno

For readers of the Rust crates trueno 0.17 (batches and a cached product on WebGPU) and trueno-gpu
0.4.29 (resident tensors on CUDA): what each of their public names is called here. One design covers
both, on every backend, and a tensor of one part is a tensor of the other.

This page is made by `make_from_trueno.py`. The expressions below are run as they stand, on
every device, by `tests/docs/test_seed_surface.py`.

```python
import numpy as np
import centella as ct

device = ct.device("cpu")
array = np.arange(12, dtype=np.float32).reshape(3, 4)

batch = device.batch()
x = batch.upload(array)
y = batch.relu(batch.scale(x, 0.5))
batch.execute()
print(batch.read(y))

cache = ct.MatmulCache(device)
cache.upload_weight("up", np.ones((5, 4), np.float32))  # [out, in]
print(cache.matmul("up", y).numpy())  # the batch's result stays on the device
```

Three programs to read: [a batch](../examples/batch.py),
[the cached product](../examples/cached_matmul.py) and
[tensors that stay on the device](../examples/resident_tensor.py). What is asked of each part, and
which tests hold it, is on [the page of features](features.md).

## Names
"""

TITLES: dict[str, str] = {
    "GpuCommandBatch": "`batch` is `device.batch()`; `x`, `y`, `w`, `a`, `b` are its uploads, "
    "`h` is recorded on it.",
    "GpuMatmulCache": "`cache` is a `ct.MatmulCache` with a weight `up`.",
    "GpuResidentTensor": "`x` is a tensor.",
    "": "`q`, `k`, `v` are `[batch, heads, seq_len, head_dim]`, `q1`, `k1`, `v1` those of one "
    "token; `past` is a `ct.KVCache`; `nn` is `centella.nn`.",
}

SCOREBOARD = """\
## Scoreboard

Faults seen in the two crates, and the tests here that would fail on each.

| what | theirs | our test |
|---|---|---|
"""


def lines_of(rows: list[Row]) -> Iterator[str]:
    """A table of names."""
    yield "| theirs | here | |"
    yield "|---|---|---|"
    for row in rows:
        notes = [row.note] if row.note else []
        notes += [f"on {KINDS[row.only]} only"] if row.only else []
        yield f"| `{row.name}` | `{row.ours}` | {'; '.join(notes)} |"


KINDS = {"webgpu": "WebGPU", "cuda": "CUDA"}


def page() -> str:
    """The text of docs/from-trueno.md."""
    order = {f"{o}.{n}": i for i, (o, n) in enumerate(
        (owner, name) for owner, names in THEIRS.items() for name in names.split()
    )}  # fmt: skip
    parts = [INTRO]
    for owner, title in TITLES.items():
        rows = sorted(
            (r for r in ROWS if r.owner == owner), key=lambda r: order[f"{owner}.{r.name}"]
        )
        heading = f"### `{owner}`" if owner else "### Functions and types"
        parts.append("\n".join([heading, "", title, "", *lines_of(rows), ""]))
    board = [
        f"| {f.what} | {f.theirs} | {'<br>'.join(f'`{t}`' for t in f.tests)} |" for f in FAULTS
    ]
    parts.append(SCOREBOARD + "\n".join(board) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
