"""The tables of tiles by class of adapter, as a device here would have them.

    python benchmarks/run.py table --devices cuda,webgpu --json results/table.json

Runs the sweeps of products and of attention, which check each candidate before they time it, and
names the best for each class: what `ops/matmul/table.py` and `ops/attention/table.py` commit. Rates
of one candidate over several shapes count by their geometric mean.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from attention import attention_sweep
from measure import Row
from products import sweep

import centella as ct


def best(rows: Iterable[Row], field: str, key: int | None) -> Iterator[Row]:
    """The candidate with the best rates of each device, or of each device and size.

    Args:
        field: what the candidates are, for the name of a row.
        key: which number of a shape tells rows of the table apart, if any.
    """
    rates: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        yield row
        name, _, candidate = row["who"].partition(" ")
        if candidate and not candidate.startswith("checked"):
            size = 0 if key is None else row["shape"][key]
            rates[name, size][candidate].append(row["rate"])
    for (name, size), of_size in rates.items():
        means = {c: math.exp(sum(map(math.log, r)) / len(r)) for c, r in of_size.items()}
        winner = max(means, key=means.__getitem__)
        kind = ct.device(name).caps.adapter_class
        row = {"bench": f"table {field}, {kind}", "shape": [size] if size else [], "who": winner}
        rates_of = {"rate": means[winner], "worst_decile": min(of_size[winner])}
        yield {**row, "unit": "TFLOP/s", **rates_of}


def table(args: argparse.Namespace) -> Iterator[Row]:
    """Both sweeps, and the best of each."""
    yield from best(sweep(args), "products", None)
    yield from best(attention_sweep(args), "attention", -1)
