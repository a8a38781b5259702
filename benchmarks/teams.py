"""Who shares a row of softmax and argmax: each kind of team in place of the chosen one.

A round is eight replays of a captured plan over operands in turn, as in `rows`; each result is
first compared with float64. A team is written as its lanes, where it holds a row, groups that a
multiprocessor has registers for, items of which a thread keeps what it computed.

    python benchmarks/teams.py --devices cuda
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from gemv import REPLAYS, ROTATED, round_of
from measure import alternate, summary, torch_or_none
from rows import BLOCK, Case, along, copied, ends_of, error_of

import centella as ct
from centella.dtypes import DType, dtype_of, narrow
from centella.ops import argmax, softmax
from centella.ops.rows import Team, chunked, team_of
from centella.specs import make_spec
from centella.tensor import apply

try:
    from cuda.bindings import driver
except ImportError:
    driver = None
else:
    CARVEOUT = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT

MOVED = 4e9  # bytes that a replay moves
SHAPES = ((4096, 32000), (4096, 50257), (16384, 4096))
MODULES = {"softmax": softmax, "argmax": argmax}


@dataclass(frozen=True)
class Variant:
    """A team: its threads, where it holds a row, groups that a multiprocessor has registers for.

    `lanes` 0 is the chosen team; `split` has long rows in parts, each with the chosen team; of
    `kept` items a thread keeps what it computed; `carved` asks for shared memory before L1.
    """

    lanes: int = 0
    place: str = "values"
    resident: int = 0
    split: bool = False
    kept: int = 0
    carved: bool = False

    def title(self) -> str:
        """As the table has it."""
        if not self.lanes:
            return "split" if self.split else "chosen"
        parts = (self.lanes, self.place, self.resident, self.kept, "carved" if self.carved else "")
        return " ".join(str(p) for p in parts if p)

    def team(self, columns: int, width: int, caps: Any, least: int | None = None) -> Team:
        """In place of `team_of`."""
        if not self.lanes or columns * width < 1024:
            return team_of(columns, width, caps, least)
        least = columns if least is None else least
        items, threads = -(-columns // width), max(128, self.lanes)
        return Team(
            self.lanes, threads, -(-items // self.lanes), least // (self.lanes * width),
            columns % width + least % width > 0, caps.subgroups and caps.target == "ptx",
            self.place, self.resident, self.kept,
        )  # fmt: skip


CHOSEN = Variant()
VARIANTS: dict[tuple[str, int, int], tuple[Variant, ...]] = {
    ("softmax", 32000, 2): (
        CHOSEN, Variant(512, "memory", 3), Variant(512, "memory", 3, kept=1),
        Variant(512, "memory", 2, kept=4), Variant(256, "memory", 3),
        Variant(256, "memory", 3, kept=5), Variant(1024, "memory", 2),
        Variant(512, "memory", 3, carved=True),
    ),
    ("softmax", 32000, 4): (CHOSEN, Variant(1024, "memory", 1)),
    ("softmax", 50257, 2): (
        CHOSEN, Variant(512, "memory", 2), Variant(1024, "memory", 2), Variant(256, "memory", 2),
    ),
    ("softmax", 50257, 4): (CHOSEN, Variant(1024, "memory", 1)),
    ("softmax", 4096, 2): (CHOSEN, Variant(128, "memory", 8), Variant(256, "memory", 6)),
    ("argmax", 32000, 2): (
        CHOSEN, Variant(512, "values", 3), Variant(512, "values", 4), Variant(256, "values", 6),
        Variant(256, "values", 8), Variant(split=True),
    ),
    ("argmax", 32000, 4): (CHOSEN, Variant(512, "values", 3)),
    ("argmax", 50257, 2): (
        CHOSEN, Variant(1024, "values", 2), Variant(512, "values", 3), Variant(split=True),
    ),
    ("argmax", 4096, 2): (CHOSEN, Variant(128), Variant(64)),
}  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A captured plan, its error against float64, and what its kernel takes."""

    call: Any
    error: float
    kernel: str


def planned(
    device: ct.Device, case: Case, variant: Variant, turns: list[Any], count: int, host: Any
) -> Planned:  # fmt: skip
    """One variant, checked."""
    backend: Any = device.backend
    made: list[Any] = []
    compiled = type(backend).compile

    def noted(self: Any, program: Any) -> Any:
        made.append(compiled(self, program))
        if variant.carved:
            with self.current():
                driver.cuFuncSetAttribute(made[-1].function, CARVEOUT, 100)
        return made[-1]

    module, attrs = MODULES[case.name], {"team": variant.title()}  # which no lowering reads
    many = 1 << 30 if variant.split else argmax.MANY
    with (
        mock.patch.object(type(backend), "compile", noted),
        mock.patch.object(module, "team_of", variant.team),
        mock.patch.object(argmax, "MANY", many),
    ):
        replay = device.compile(
            lambda: [apply(case.name, turns[i % len(turns)], **attrs) for i in range(count)]
        )
        last = replay()[-1]
    ends = [e.astype("f32").numpy() if e.dtype.is_float else e.numpy() for e in ends_of(case, last)]
    error = error_of(case, [host], [np.asarray(e, np.float64) for e in ends])
    return Planned(
        round_of(replay, device.synchronize), error, taken(backend, made[0]) if made else ""
    )


def taken(backend: Any, made: Any) -> str:
    """What CUDA's driver says that a kernel takes, and groups of it on a multiprocessor."""
    if driver is None:
        return ""
    of = driver.CUfunction_attribute
    asked = of.CU_FUNC_ATTRIBUTE_NUM_REGS, of.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
    with backend.current():
        registers, local = (driver.cuFuncGetAttribute(a, made.function)[1] for a in asked)
        groups = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            made.function, made.threads, made.dynamic
        )[1]
    return f"{registers} registers, {local} spilled, {groups} groups of {made.threads}"


def held(rows: int, columns: int, dtype: DType) -> Any:
    """Random rows as they are stored, which repeat."""
    block = np.random.default_rng(1).standard_normal((BLOCK, columns), np.float32)
    return narrow(block, dtype)[np.arange(rows) % BLOCK]


def lines(args: argparse.Namespace) -> Iterator[str]:
    """A line of the table for each variant."""
    torch, device = torch_or_none(), ct.device(args.devices)
    for rows, columns in SHAPES:
        for kind in args.dtypes.split(","):
            dtype = dtype_of(kind)
            if kind == "bf16" and columns != SHAPES[0][1] and not args.full:
                continue
            names = [n for n in MODULES if (n, columns, dtype.itemsize) in VARIANTS]
            if not names:
                continue
            many = rows if not args.small else 300
            host = (held(many, columns, dtype), dtype)
            spec = make_spec((many, columns), dtype, 16)
            sets = 1 if args.small else max(1, math.ceil(ROTATED / host[0].nbytes))
            turns = [ct.asarray(*host, device) for _ in range(sets)]
            for case in along(many, columns):
                if case.name in names and case.name in args.ops:
                    variants = VARIANTS[case.name, columns, dtype.itemsize]
                    if not chunked(spec):
                        variants = variants[:1]
                    yield from table(device, torch, case, variants, turns, host, args)


def table(
    device: ct.Device, torch: Any, case: Case, variants: tuple[Variant, ...], turns: list[Any],
    host: Any, args: argparse.Namespace,
) -> Iterator[str]:  # fmt: skip
    """The variants of one op at one size, best first."""
    nbytes = case.moved[0] * host[1].itemsize + case.moved[1]
    count = 1 if args.small else max(len(turns), math.ceil(MOVED / nbytes))
    found: dict[str, Planned] = {}
    for variant in variants:
        try:
            found[variant.title()] = planned(device, case, variant, turns, count, host)
        except Exception as error:
            yield f"{case.name:8} {host[1].name:4} {variant.title():16} failed: {error}"
    calls = {name: one.call for name, one in found.items()}
    copy = copied(torch, [args.devices], nbytes, len(turns), count)
    seconds = alternate({**calls, "copy": copy.call}, args.rounds)
    amount = nbytes * count * REPLAYS / 1e12
    rate = {name: summary(times, amount)["rate"] for name, times in seconds.items()}
    for name in sorted(found, key=lambda n: -rate[n]):
        one, bound = found[name], max(2e-6, host[1].epsilon)
        yield (
            f"{case.name:8} {host[1].name:4} {'x'.join(map(str, case.shape)):11} {name:16} "
            f"{100 * rate[name] / rate['copy']:5.1f} % of {rate['copy']:.2f} TB/s  "
            f"{'right' if one.error < bound else 'WRONG'} {one.error:.1e}  {one.kernel}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="cuda")
    parser.add_argument("--dtypes", default="f16,bf16,f32")
    parser.add_argument("--ops", default="softmax,argmax")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="few rows, to try the script")
    parser.add_argument("--full", action="store_true", help="bf16 at all sizes")
    start = time.perf_counter()
    args = parser.parse_args()
    for line in lines(args):
        print(f"{time.perf_counter() - start:5.1f} {line}", flush=True)


if __name__ == "__main__":
    main()
