"""Broken and hostile model files by the thousand: each is read, or refused by a typed error.

    python -m tests.support.fuzz_files --safetensors 20000 --folders 10000

A case is a kind and a number: the same damage each time, `--only folder:1234` runs one. Cases run
in processes of a batch each, so that one that ends its process is told too. A case fails that
raises anything but a CentellaError, takes over a second or over 64 MB beyond its files, has an
error that no terminal takes, or gives vectors that are no numbers though its weights are sound.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.damaged_files import broken_safetensors, packed, sound_file, write_folder

KINDS = ("safetensors", "folder")
SECONDS, MEGABYTES, TEXT = 1.0, 64.0, 3000
BATCH = 500

# -- one case -------------------------------------------------------------------------------------


def memory() -> tuple[float, float]:
    """MB that the process has, and the most it has had since `forget_peak`."""
    try:
        lines = Path("/proc/self/status").read_text()
        kilobytes = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", lines))
        return int(kilobytes["VmRSS"]) / 1024, int(kilobytes["VmHWM"]) / 1024
    except (OSError, KeyError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return peak, peak


def forget_peak() -> None:
    """Begin to count the most memory anew, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def read_case(kind: str, number: int, folder: Path) -> tuple[Callable[[], Any], bool]:
    """Write a case; what reads it, and whether it must give numbers."""
    from centella.weights import open_checkpoint

    rng = random.Random(f"{kind}:{number}")
    if kind == "folder":
        sound = write_folder(rng, folder)
        return lambda: load_and_encode(folder), sound
    header, data = sound_file(rng)
    raw = packed(json.dumps(header).encode(), data)
    (folder / "model.safetensors").write_bytes(broken_safetensors(rng, raw))
    return lambda: [t.array.sum() for t in open_checkpoint(folder).values()], False


def load_and_encode(folder: Path) -> Any:
    """The vectors of two texts."""
    import centella as ct

    return ct.load(folder, device="cpu").encode(["The storm came, 7 times over!", ""])


def run_case(kind: str, number: int) -> dict[str, Any]:
    """Run one case: its outcome, its time and its memory; `fault` says what is wrong with it."""
    from centella.errors import CentellaError

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        read, sound = read_case(kind, number, folder)
        size = sum(f.lstat().st_size for f in folder.rglob("*") if not f.is_dir()) / 2**20
        forget_peak()
        before, begin = memory()[0], time.process_time()
        fault, outcome = "", "read"
        try:
            with np.errstate(all="ignore"):
                result = read()
            if sound and not np.isfinite(result).all():
                fault = "vectors that are no numbers"
        except CentellaError as error:
            outcome, text = type(error).__name__, str(error)
            if len(text) > TEXT or re.search("[\x1b\ud800-\udfff]", text):  # no terminal takes
                fault = f"an error of {len(text)} characters: {text[:200]!r}"
        except BaseException as error:  # a panic of Rust is no Exception
            outcome = type(error).__name__
            fault = f"{outcome}: {error!s:.300}"
        seconds, extra = time.process_time() - begin, memory()[1] - before - size
    if seconds > SECONDS:
        fault = fault or f"{seconds:.2f} s"
    if extra > MEGABYTES:
        fault = fault or f"{extra:.0f} MB beyond its files"
    return {
        "kind": kind, "number": number, "outcome": outcome, "fault": fault,
        "seconds": seconds, "extra": extra,
    }  # fmt: skip


# -- batches --------------------------------------------------------------------------------------


def work(kind: str, start: int, stop: int) -> None:
    """Run cases in this process; a line of JSON each."""
    logging.disable(logging.CRITICAL)
    run_case(kind, start)  # which loads modules, so its time and memory are not looked at
    for number in range(start, stop):
        print(json.dumps(run_case(kind, number)), flush=True)


def batch(kind: str, start: int, stop: int) -> Iterator[dict[str, Any]]:
    """Run cases in a process of their own; one that ends it is a fault, and the rest goes on."""
    while start < stop:
        command = [sys.executable, "-m", "tests.support.fuzz_files"]
        command += ["--work", f"{kind}:{start}:{stop}"]
        limit = 60.0 + (stop - start)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            printed, ended = done.stdout, f"the process ended with {done.returncode}"
            complete = done.returncode == 0
        except subprocess.TimeoutExpired as error:
            printed = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else ""
            ended, complete = f"no end in {limit:.0f} s", False
        results = [json.loads(line) for line in printed.splitlines()]
        yield from results
        if complete:
            return
        start = max((r["number"] for r in results), default=start - 1) + 1
        yield {"kind": kind, "number": start, "outcome": "ended", "fault": ended,
               "seconds": 0.0, "extra": 0.0}  # fmt: skip
        start += 1


def run(kind: str, cases: int, first: int = 0, size: int = BATCH) -> list[dict[str, Any]]:
    """All cases of one kind."""
    results: list[dict[str, Any]] = []
    for start in range(first, first + cases, size):
        results += batch(kind, start, min(start + size, first + cases))
    return results


def report(kind: str, results: list[dict[str, Any]]) -> int:
    """Print what came of the cases of one kind; how many have a fault."""
    outcomes = Counter(r["outcome"] for r in results)
    faults = [r for r in results if r["fault"]]
    slowest, largest = (max((r[k] for r in results), default=0.0) for k in ("seconds", "extra"))
    print(f"{kind}: {len(results)} cases: {dict(outcomes)}; at most {slowest:.2f} s, "
          f"{largest:.1f} MB beyond the files; {len(faults)} with a fault", flush=True)  # fmt: skip
    for r in faults[:50]:
        print(f"  {kind}:{r['number']}: {r['fault']}")
    return len(faults)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--safetensors", type=int, default=0, help="how many files")
    parser.add_argument("--folders", type=int, default=0, help="how many model folders")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", help="one case, as kind:number")
    parser.add_argument("--keep", type=Path, help="with --only: a folder to write the case to")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        kind, start, stop = asked.work.split(":")
        work(kind, int(start), int(stop))
        return 0
    if asked.only:
        kind, _, number = asked.only.partition(":")
        if asked.keep:
            shutil.rmtree(asked.keep, ignore_errors=True)
            asked.keep.mkdir(parents=True)
            read_case(kind, int(number), asked.keep)
        print(json.dumps(run_case(kind, int(number)), indent=1))
        return 0
    counts = dict(zip(KINDS, (asked.safetensors, asked.folders), strict=True))
    return min(1, sum(report(k, run(k, n, asked.first)) for k, n in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
