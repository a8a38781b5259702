"""All cases in a budget of seconds, what matters most first: `run.py all`.

Each case is a process of its own with a limit, and writes its JSON after each row, so that one that
is cut off keeps what it has. Those that the budget has no room for are named at the end, so that
another run takes them: `--cases`. A table of all rows comes last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from measure import Row
from msgspec import Struct

import centella as ct

SCRIPT = Path(__file__).with_name("run.py")
LEAST = 20.0  # seconds: with less left no case begins
WIDE = 30  # characters of a name in the table


class Case(Struct, frozen=True):
    """One result file.

    Attributes:
        words: of the command line; seconds: that it is expected to take on one H200.
        cpu: whether it runs without a GPU, and on the CPU alone.
        cards: whether it runs on all CUDA devices that are here, two or more.
    """

    name: str
    words: str
    seconds: int
    cpu: bool = False
    cards: bool = False


CASES = (
    Case("generate", "generate --rows 1", 90),
    Case("timeline", "timeline --shapes 4b,0.6b", 20),
    Case("speculation", "speculation --shapes 4b,0.6b", 20),
    Case("transcribe", "transcribe", 70),
    Case("speech", "speech --rows 1,8", 160),
    Case("first-text", "first --shapes whisper-tiny", 30),
    Case("minilm", "minilm --dtypes f16,f32 --model {model}", 50),
    Case("sentence", "sentence --model {model}", 20),
    Case("passages", "passages --model {model} --rounds 5", 40),
    Case("search", "search --shapes 1e6", 40),
    Case("first", "first --shapes qwen3-0.6b,qwen3-4b", 130),
    Case("generate-quantized", "generate --rows 1 --shapes 4b --dtypes q8_0,q4_k", 50),
    Case("generate-k", "generate --rows 1,16 --shapes 4b --dtypes q4_k_m,q5_k,q6_k,iq4_xs", 90),
    Case("generate-8b", "generate --rows 1 --shapes 8b", 50),
    Case("generate-long", "generate --rows 1 --shapes 4b --prompt 8192,32768", 60),
    Case("generate-moe", "generate --rows 1,16 --shapes 30b-a3b", 60),
    Case("llama", "llama --rows 1 --shapes 4b,0.6b --prompt 512", 300),
    Case("llama-quantized", "llama --rows 1 --shapes 4b --dtypes q8_0,q4_k", 60),
    Case("llama-long", "llama --rows 1 --shapes 4b --prompt 8192,32768", 60),
    Case("shapes", "shapes --shapes bge-m3,reranker,modernbert", 200),
    Case("generate-batches", "generate --rows 4,8,16,64 --prompt 1024", 100),
    Case("llama-batches", "llama --rows 4,8,16,64 --shapes 4b --prompt 1024", 60),
    Case("million", "million --model {model}", 70),
    Case("several", "several --dtypes f16 --model {model}", 60, cards=True),
    Case("several-large", "several --dtypes f16 --shapes bge-m3", 60, cards=True),
    Case("generate-compiled", "generate --rows 1 --shapes 4b --prompt 512 --compile", 150),
    Case("first-text-large", "first --shapes whisper-large-v3", 50),
    Case("search-1e7", "search --shapes 1e7", 80),
    Case("cpu-speech", "transcribe --shapes tiny", 60, cpu=True),
)
# Rows of both devices.
WEBGPU = ("generate", "generate-moe", "minilm", "sentence", "search", "speech")


def every(args: argparse.Namespace) -> None:
    """Run the cases, and print what they gave."""
    folder, begin = Path(args.json or "results"), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    asked = args.cases.split(",") if args.cases else [case.name for case in CASES]
    known = {case.name: case for case in CASES}
    done: list[Case] = []
    left: list[str] = []
    for name in asked:
        case = known[name]
        room = args.budget - (time.monotonic() - begin)
        if room < (LEAST if args.small else max(LEAST, case.seconds / 2)):
            left.append(name)
        elif run(case, args, folder, min(room, 2.0 * case.seconds + 30)):
            done.append(case)
    table(done, args.name, folder)
    if left:
        print(f"no time was left for: --cases {','.join(left)}")


def run(case: Case, args: argparse.Namespace, folder: Path, limit: float) -> bool:
    """One case; whether a device for it is here."""
    anything = args.small or case.name in WEBGPU
    devices = [name for name in args.devices if anything or name.startswith("cuda")]
    devices = ["cpu"] if case.cpu else devices
    if case.cards and not args.small:
        devices = [name for name in ct.devices() if name.startswith("cuda")]
    if len(devices) < (2 if case.cards and not args.small else 1):
        print(f"{case.name}: skipped, no device for it is here", flush=True)
        return False
    words = case.words.format(model=args.model).split()
    if args.small and "--shapes" in words:  # tiny ones instead
        at = words.index("--shapes")
        del words[at : at + 2]
    words += ["--devices", ",".join(devices), "--json", str(file_of(case, args.name, folder))]
    words += ["--small", "--rounds", "1"] if args.small else []
    words += ["--llama", args.llama] if args.llama else []
    begin = time.monotonic()
    with (folder / f"{args.name}-{case.name}.log").open("w") as log:
        try:
            ran = subprocess.run([sys.executable, str(SCRIPT), *words], stdout=log, stderr=log,
                                 timeout=limit)  # fmt: skip
            state = "done" if ran.returncode == 0 else f"failed, rc {ran.returncode}"
        except subprocess.TimeoutExpired:
            state = "cut off"
    seconds = time.monotonic() - begin
    print(f"{case.name}: {state} after {seconds:.0f} s, expected {case.seconds}", flush=True)
    if state.startswith("failed"):
        print("  " + "\n  ".join(Path(log.name).read_text().splitlines()[-6:]), flush=True)
    return True


def file_of(case: Case, machine: str, folder: Path) -> Path:
    """Where a case's rows are."""
    return folder / f"{machine}-{case.name}.json"


def table(done: list[Case], machine: str, folder: Path) -> None:
    """A short line for each row of all cases."""
    for case in done:
        file = file_of(case, machine, folder)
        rows: list[Row] = json.loads(file.read_text())["rows"] if file.exists() else []
        for row in rows:
            shape = "x".join(map(str, row["shape"]))
            if "skipped" in row:
                print(f"{row['bench'][:WIDE]} {shape} {row['who'][:WIDE]}: {row['skipped']}")
                continue
            share = f" {row['share']:.0%}" if "share" in row else ""
            bar = f" bar {row['bar']:,.1f}" if "bar" in row else ""
            p99 = f" p99 {row['p99']:,.2f}" if "p99" in row else ""
            print(f"{row['bench'][:WIDE]} {shape} {row['who'][:WIDE]}: "
                  f"{row['rate']:,.2f} {row['unit']}{share}{p99}{bar}")  # fmt: skip
