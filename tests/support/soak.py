"""Memory of a process that computes on inputs of random sizes for a long time.

    python -m tests.support.soak --device webgpu --calls 100000
    python -m tests.support.soak --work encode --calls 10000

There are more sizes than captures are kept, so captures come and go: "chain" replays a function of
16 small launches, "encode" has an Embedder encode texts. The resident size after the first tenth of
the calls, when all that is kept is there, is what later ones are compared with.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

import centella as ct

MODEL = Path(__file__).parents[1] / "data" / "tiny-bert"
SIZES = 48  # of inputs; an Embedder keeps 40 captures
CAPTURES = 24
WORDS = ("the", "rain", "of", "light", "a", "storm", "and", "its", "far", "thunder")


class Sample(Struct, frozen=True):
    """The process after some calls.

    Attributes:
        resident: bytes of the process in memory; objects: what Python's collector knows.
        pool_bytes: what the device's pool has of the driver.
    """

    calls: int
    resident: int
    objects: int
    pool_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.calls:>9,} calls  resident {self.resident / 1e6:8.1f} MB  "
            f"pool {self.pool_bytes / 1e6:6.1f} MB  objects {self.objects:,}"
        )


def resident() -> int:
    """Bytes of this process in memory, as Linux counts them."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def sample(calls: int, device: ct.Device) -> Sample:
    """The process as it is now, garbage collected."""
    gc.collect()
    return Sample(calls, resident(), len(gc.get_objects()), device.memory.held)


def encoding(device: ct.Device) -> Callable[[random.Random], None]:
    """Encodes texts of a random number, of random lengths, in one batch."""
    embedder = ct.load(MODEL, device)

    def step(rng: random.Random) -> None:
        count = rng.randint(1, SIZES)
        texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, len(WORDS)))) for _ in range(count)]
        assert np.isfinite(embedder.encode(texts, batch_size=count)).all()

    return step


def chain(device: ct.Device) -> Callable[[random.Random], None]:
    """Replays a function of 16 launches on a random number of rows."""

    def softmaxes(x: ct.Tensor) -> ct.Tensor:
        for _ in range(16):
            x = ct.softmax(x)
        return x

    fn = ct.jit(softmaxes, device=device, maxsize=CAPTURES)

    def step(rng: random.Random) -> None:
        x = np.ones((rng.randint(1, SIZES), 4), np.float32)
        assert (fn.fetch(x).result() == 0.25).all()

    return step


WORKS = {"chain": chain, "encode": encoding}


def soak(
    work: str, device: ct.Device, calls: int, show: Callable[[Sample], None] = lambda _: None
) -> list[Sample]:
    """The process after each tenth of `calls` calls."""
    step = WORKS[work](device)
    rng = random.Random(0)
    samples: list[Sample] = []
    for call in range(1, calls + 1):
        step(rng)
        if call % max(1, calls // 10) == 0:
            samples.append(sample(call, device))
            show(samples[-1])
    return samples


def soak_alone(work: str, device: str, calls: int) -> list[Sample]:
    """The same in a process of its own, which has nothing else in memory."""
    command = [sys.executable, "-m", "tests.support.soak", "--json", "--work", work]
    command += ["--device", device, "--calls", str(calls)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return [msgspec.json.decode(line, type=Sample) for line in ran.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", default="chain", choices=WORKS)
    parser.add_argument("--device", default="webgpu")
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each tenth")
    asked = parser.parse_args()
    begin = time.perf_counter()

    def show(sample: Sample) -> None:
        print(msgspec.json.encode(sample).decode() if asked.json else sample, flush=True)

    first, *_, last = soak(asked.work, ct.device(asked.device), asked.calls, show)
    if asked.json:
        return
    grown = last.resident - first.resident
    print(f"{time.perf_counter() - begin:.0f} s; {grown / 1e6:+.1f} MB after the first tenth, "
          f"{grown / (last.calls - first.calls):+.1f} bytes a call")  # fmt: skip


if __name__ == "__main__":
    main()
