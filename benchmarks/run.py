"""Check, time and compare: one script for every figure that README and docs print.

    python benchmarks/run.py gemm --devices cuda,webgpu --json results/gemm.json
    python benchmarks/run.py sweep --devices cuda,webgpu --json results/sweep.json
    python benchmarks/run.py mma --devices cuda --dtypes bf16,f16 --json results/mma.json
    python benchmarks/run.py imported --devices cuda,webgpu --json results/imported.json
    python benchmarks/run.py attention-cores --devices cuda --json results/attention.json
    python benchmarks/run.py gemv --devices cuda,webgpu --json results/gemv.json
    python benchmarks/run.py thin --devices cuda --dtypes f16 --rows 1,4 --json results/thin.json
    python benchmarks/run.py thin --devices cuda --dtypes bf16 --rows 64 --shapes 6144x2560
    python benchmarks/run.py attention --devices cuda,webgpu --json results/attention.json
    python benchmarks/run.py bias --devices cuda --json results/bias.json
    python benchmarks/run.py decode --devices cuda,webgpu --json results/decode.json
    python benchmarks/run.py generate --devices cuda,webgpu --rows 1 --json results/generate.json
    python benchmarks/run.py timeline --devices cuda --json results/timeline.json
    python benchmarks/run.py speculation --devices cuda --json results/speculation.json
    python benchmarks/run.py llama --rows 1,16 --llama llama_cpp_python-0.3.36.tar.gz
    python benchmarks/run.py search --devices cuda,webgpu --json results/search.json
    python benchmarks/run.py speech --devices cuda,webgpu --rows 1,8 --json results/speech.json
    python benchmarks/run.py transcribe --devices cuda --json results/transcribe.json
    python benchmarks/run.py rows --devices cuda,webgpu --json results/rows.json
    python benchmarks/run.py whole-rows --devices cuda --json results/whole-rows.json
    python benchmarks/run.py epilogues --devices cuda --json results/epilogues.json
    python benchmarks/run.py tiles --devices cuda,webgpu --json results/tiles.json
    python benchmarks/run.py table --devices cuda,webgpu --json results/table.json
    python benchmarks/run.py minilm --model DIR --devices cuda,webgpu,cpu
    python benchmarks/run.py gates --devices cuda --json results/gates.json
    python benchmarks/run.py encoder --devices cuda,webgpu --json results/encoder.json
    python benchmarks/run.py passages --model DIR --devices cuda,webgpu --json results/passages.json
    python benchmarks/run.py sentence --model DIR --devices cuda --json results/sentence.json
    python benchmarks/run.py million --model DIR --devices cuda --json results/million.json
    python benchmarks/run.py shapes --devices cuda --json results/shapes.json
    python benchmarks/run.py texts --devices cpu,cuda --json results/texts.json
    python benchmarks/run.py several --devices all --dtypes f16 --json results/several.json
    python benchmarks/run.py cpu --model DIR --json results/cpu.json
    python benchmarks/run.py start --devices cpu,webgpu
    python benchmarks/run.py first --devices cuda --shapes qwen3-0.6b --json results/first.json
    python benchmarks/run.py all --devices cuda,webgpu --model DIR --budget 500 --json results
    python benchmarks/run.py import
    python benchmarks/run.py host --devices webgpu
    python benchmarks/run.py floor --devices cuda,webgpu --json results/floor.json

Products are first compared with float64, vectors with those of the first device or transformers.
Ours and the peer alternate, on random data; products go over operands rotated through more than
four times the L2 cache. Medians and worst deciles of the rounds are printed, and written as JSON
with machine, versions and commit, after each row. A device that is not here is skipped, with the
reason. A DIR without weights gets random ones, in MiniLM's shape. `all` runs what matters most
first, each case in a process of its own (every.py), until the budget of seconds is spent.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_webgpu
from attention import attention, attention_sweep, bias
from attention_cores import attention_cores
from checkpoints import embedder
from cpu import cpu
from decode import decode, decode_sweep
from encoder import encoder
from epilogues import epilogues
from every import CASES, every
from fresh import first, start
from gates import gates
from gemv import gemv, thin_sweep
from generate import generate
from imported import imported
from measure import Call, Row, alternate, bert, cost, gpu, machine, summary, torch_or_none
from million import million
from passages import passages
from peer_llama import llama
from products import gemm, sweep
from rows import rows
from search import search
from several import several
from shapes import sentence, shapes
from speculation import speculation
from speech import speech
from streams import streams
from table import table
from tensor_cores import mma
from texts import texts
from timeline import timeline
from transcribe import transcribe
from whole_rows import whole_rows

import centella as ct
from centella.check.bench import floor as measure_floor
from centella.runtime.device import every_device
from centella.tasks.embed.embedder import Forward

MINILM, SMALL = ((512, 128), (32, 128), (1, 16)), ((2, 8),)  # texts and tokens

# -- MiniLM ----------------------------------------------------------------------------------------


def token_batch(rows: int, length: int) -> Any:
    """Random ids of a full batch; few of them, for a tiny vocabulary, in a small one."""
    low, high = (1000, 20000) if length > SMALL[0][1] else (10, 60)
    return np.random.default_rng(1).integers(low, high, (rows, length), dtype=np.int32)


def minilm(args: argparse.Namespace) -> Iterator[Row]:
    """Sentences a second, ids on the host to vectors on the host, transformers beside."""
    torch = torch_or_none()
    for size, length in SMALL if args.small else MINILM:
        for dtype in (args.dtypes or "f32").split(","):
            contestants: dict[str, Call] = {}
            results: dict[str, Any] = {}
            for name in args.devices:
                if name == "cpu" and size > 32:
                    continue
                embedder = ct.load(args.model, device=name, dtype=dtype)
                ids = token_batch(size, length)
                contestants[name] = _embed(embedder, ids, name, results)
            if torch is not None:
                contestants["transformers"] = _peer(torch, args.model, size, length, dtype, results)
                if dtype == "f32" and "webgpu" in args.devices and onnx_webgpu.available():
                    peer = onnx_webgpu.minilm(
                        bert(args.model, torch.float32), token_batch(size, length), results
                    )
                    if peer is not None:
                        contestants[onnx_webgpu.WHO] = peer
            if not contestants:
                continue
            seconds = alternate(contestants, args.rounds)
            first = results[next(iter(results))]
            for name, times in seconds.items():
                cosine = float(np.min(np.sum(first * results[name], -1)))
                assert cosine > 0.999, (name, cosine)
                row = {"bench": f"MiniLM {dtype}", "shape": [size, length], "who": name,
                       "unit": "sentences/s"}  # fmt: skip
                yield {**row, **summary(times, size), "cosine": cosine}


def _embed(embedder: Any, ids: Any, name: str, results: Row) -> Call:
    """One batch: ids to vectors, as `encode` has it after the tokenizer."""
    forward = Forward(embedder)
    lengths = np.full(len(ids), ids.shape[1], np.int32)

    def call() -> None:
        results[name] = forward.captured.fetch(ids, lengths, True, None).result()["dense"]

    return call


def _peer(torch: Any, model: str, size: int, length: int, dtype: str, results: Row) -> Call:
    kind = torch.float16 if dtype == "f16" else torch.float32
    peer = bert(model, kind).to("cuda")
    ids = torch.from_numpy(token_batch(size, length).astype(np.int64))

    def call() -> None:
        with torch.inference_mode():
            on_device = ids.cuda()
            states = peer(on_device, attention_mask=torch.ones_like(on_device)).last_hidden_state
            pooled = torch.nn.functional.normalize(states.float().mean(1), dim=-1)
            results["transformers"] = pooled.cpu().numpy()

    return call


# -- host ------------------------------------------------------------------------------------------


def import_time(args: argparse.Namespace) -> list[Row]:
    """Milliseconds that `import centella` adds to NumPy's own import, in fresh processes."""
    code = (
        "import time, numpy; a = time.perf_counter(); import centella; "
        "print(1e3 * (time.perf_counter() - a))"
    )
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
        for _ in range(15)
    ]
    return [{"bench": "import centella beyond numpy", "who": "cpu", "unit": "ms", "shape": [],
             **cost(times, 1.0)}]  # fmt: skip


CHAIN = 200


def host(args: argparse.Namespace) -> list[Row]:
    """Microseconds an operation until the call returns, of an unfusable chain; the device is idle.

    Recorded and submitted as a batch, and replayed from a capture. The result is kept: of a batch
    whose results nobody has, nothing is launched.
    """

    def chain(y: ct.Tensor) -> ct.Tensor:
        for _ in range(CHAIN):
            y = ct.softmax(y)
        return y

    rows: list[Row] = []
    for name in args.devices:
        device = ct.device(name)
        x = ct.asarray(np.ones((64, 64), np.float32), device=device)
        replay = device.compile(chain, x)

        kept: dict[str, ct.Tensor] = {}

        def record(d: Any = device, t: Any = x, kept: Any = kept) -> None:
            with d.batch():
                kept["y"] = chain(t)

        def again(run: Any = replay, t: Any = x, kept: Any = kept) -> None:
            kept["y"] = run(t)

        with ct.ledger() as led:
            record()
        led.expect(launches=CHAIN, submissions=1)
        ways: dict[str, Call] = {"record to submit": record, "replay": again}
        seconds = alternate(ways, args.rounds, device.synchronize)
        for bench, times in seconds.items():
            rows.append({"bench": bench, "who": name, "unit": "us/op", "shape": [CHAIN],
                         **cost(times, 1e6 / CHAIN)})  # fmt: skip
    return rows


def floor(args: argparse.Namespace) -> list[Row]:
    """`centella bench floor` on each device: counts, and times of the same run."""
    rows: list[Row] = []
    for name in args.devices:
        report = measure_floor(name, small=args.small)
        for f in report.figures:
            worst = f.ours if f.worst is None else f.worst
            rows.append({"bench": f"{f.part}: {f.what}", "shape": f.shape, "who": name,
                         "unit": f.unit or "in all", "theirs": f.theirs, "rate": f.ours,
                         "worst_decile": worst, "rounds": f.rounds})  # fmt: skip
        rows[-1].update(device=report.details, notes=report.notes)
    return rows


BENCHES = {
    "gemm": gemm, "sweep": sweep, "mma": mma, "imported": imported, "gemv": gemv,
    "thin": thin_sweep, "attention": attention, "bias": bias, "tiles": attention_sweep,
    "table": table, "minilm": minilm,
    "cpu": cpu, "start": start, "first": first, "import": import_time, "host": host, "floor": floor,
    "texts": texts, "passages": passages,
    "attention-cores": attention_cores, "encoder": encoder, "decode": decode,
    "decode-sweep": decode_sweep, "rows": rows, "generate": generate,
    "search": search, "several": several, "speech": speech, "streams": streams,
    "timeline": timeline, "transcribe": transcribe, "shapes": shapes, "sentence": sentence,
    "million": million, "speculation": speculation, "llama": llama, "gates": gates,
    "whole-rows": whole_rows, "epilogues": epilogues,
}  # fmt: skip


def present(names: str) -> list[str]:
    """The devices of a comma-separated list, or "all", that are here; says why one is not."""
    devices = []
    for name in [d.name for d in every_device()] if names == "all" else names.split(","):
        try:
            ct.device(name)
        except (ct.DeviceError, ct.MissingExtraError) as error:
            print(f"{name}: skipped, {str(error).splitlines()[0]}")
        else:
            devices.append(name)
    return devices


def show(rows: Iterable[Row], keep: Callable[[list[Row]], None], budget: float) -> list[Row]:
    """Print and keep rows as they come; no further one is waited for after `budget` seconds."""
    shown: list[Row] = []
    begin = time.monotonic()
    for row in rows:
        print(line_of(row), flush=True)
        shown.append(row)
        keep(shown)
        if time.monotonic() - begin > budget:
            print(f"stopped: {budget:.0f} s are over", flush=True)
            break
    return shown


def line_of(row: Row) -> str:
    """A row as it is printed."""
    shape = "x".join(map(str, row["shape"]))
    if "skipped" in row:
        return f"{row['bench']:<28} {shape:<16} {row['who']:<30} skipped: {row['skipped']}"
    share = f", {row['share']:.1%} of {row.get('of', 'a plain read')}" if "share" in row else ""
    share += f", best {row['best']:,.2f}" if "best" in row else ""
    share += f", p99 {row['p99']:,.2f}" if "p99" in row else ""
    share += f", bar {row['bar']:,.2f}" if "bar" in row else ""
    return (f"{row['bench']:<28} {shape:<16} {row['who']:<30} {row['rate']:>10,.2f} "
            f"{row['unit']:<12} worst decile {row['worst_decile']:,.2f}{share}")  # fmt: skip


def main() -> None:
    """Run one benchmark and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bench", choices=[*BENCHES, "all"])
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--dtypes", help="of parameters: f32,f16; gemv: weights, or weights/x")
    parser.add_argument("--rows", default="1,2,4,8,16", help="of x, for gemv and thin")
    parser.add_argument("--prompt", default="", help="generate: tokens of the past, 512,8192")
    parser.add_argument("--beam", type=int, default=1, help="generate: beam searches, too")
    parser.add_argument("--cache", default="f", help="generate, decode: keys and values: f,i8")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--llama", default="", metavar="PATH",
                        help="llama: a folder of llama.cpp's programs, or its source")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--tiles", nargs="?", const="", metavar="WORDS",
        help="mma, attention-cores, whole-rows: other tiles too: all, or those named with (a,b)",
    )  # fmt: skip
    parser.add_argument(
        "--shapes",
        default="",
        help="mma, imported: m x n x k, ...; gemv, thin: n x k, ...; rows: ops",
    )
    parser.add_argument(
        "--compile", action="store_true", help="encoder, generate: torch.compile as well"
    )
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script")
    names = ",".join(case.name for case in CASES)
    parser.add_argument("--cases", help=f"all: which, and in which order: {names}")
    parser.add_argument("--name", default="h200", help="all: what result files begin with")
    parser.add_argument(
        "--budget",
        type=float,
        default=math.inf,
        metavar="S",
        help="no row begins after S seconds, with all no case",
    )
    parser.add_argument("--json", help="write the rows, with machine and versions, here")
    args = parser.parse_args()
    args.devices = present(args.devices)
    if args.bench == "all":
        with embedder(args.model) as args.model:
            every(args)
        return
    before = machine()

    def keep(rows: list[Row], **more: str) -> None:
        if args.json:
            path = Path(args.json)
            path.parent.mkdir(parents=True, exist_ok=True)
            report = {"machine": before, **more, "rows": rows}
            path.write_text(json.dumps(report, indent=1) + "\n")

    rows = show(BENCHES[args.bench](args), keep, args.budget)
    keep(rows, gpu_after=gpu())


if __name__ == "__main__":
    main()
