"""New processes: a cold `centella embed`, and the first token or text of models on the disk.

Checkpoints are written here, at a speed that a row says, and so lie in the page cache. "first"
finds the caches of compiled kernels empty, "again" as the process before has left them. Peer:
transformers in a new process, the same folder. Of decoders "loaded" is how fast their files come to
the device, "q8_0 at load" how long that takes with quantising there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

from checkpoints import words, write
from measure import Row, cost, summary, timed, torch_or_none
from sound import write_wav

import centella as ct

CACHES = (
    "XDG_CACHE_HOME", "MESA_SHADER_CACHE_DIR", "CUDA_CACHE_PATH", "__GL_SHADER_DISK_CACHE_PATH",
)  # fmt: skip


def start(args: argparse.Namespace) -> Iterator[Row]:
    """Milliseconds of `centella embed hello` in fresh processes, device by device.

    Each way twice: with the drivers' caches of compiled kernels, and ours of self-checks and wgpu's
    header, empty ("first"), and as a second process finds them ("again"). Python's byte code is
    there both times, as pip leaves it with every package. Processes of their own say how long all
    programs took to compile, text and driver ("compile").
    """
    with tempfile.TemporaryDirectory() as code:
        kept = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
        yield from _start(args, {**kept, "PYTHONPYCACHEPREFIX": code})


def _start(args: argparse.Namespace, environment: dict[str, str]) -> Iterator[Row]:
    for name in args.devices:
        code = "from centella.cli import main; main()"
        command = [sys.executable, "-c", code, "embed", "hello", "--model", args.model,
                   "--device", name]  # fmt: skip
        spent: dict[tuple[str, str], list[float]] = {}
        _process(command, environment)  # writes the byte code
        for _ in range(max(3, args.rounds // 3)):
            with tempfile.TemporaryDirectory() as caches, tempfile.TemporaryDirectory() as others:
                for when in ("first", "again"):
                    wall, user = _process(command, {**environment, **dict.fromkeys(CACHES, caches)})
                    spent.setdefault((when, "wall"), []).append(wall)
                    spent.setdefault((when, "user time"), []).append(user)
                    there = {**environment, **dict.fromkeys(CACHES, others)}
                    spent.setdefault((when, "compile"), []).append(_compile(command, there))
        for (when, what), times in spent.items():
            bench = f"centella embed, {when}, {what}"
            yield {"bench": bench, "who": name, "unit": "ms", "shape": [1],
                   "best": 1e3 * min(times), **cost(times, 1e3)}  # fmt: skip


def _process(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Wall and user seconds of a process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    begin = time.perf_counter()
    ran = subprocess.run(command, capture_output=True, env=environment, text=True)
    wall = time.perf_counter() - begin
    if ran.returncode:
        raise RuntimeError(f"{command[:3]}: {ran.stderr[-2000:]}")
    return wall, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used


def _first_output(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Seconds until a process writes, and until it has ended."""
    with tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors,
                              env=environment) as ran:  # fmt: skip
            assert ran.stdout is not None
            ran.stdout.read(1)
            written = time.perf_counter() - begin
            ran.communicate()
        ended = time.perf_counter() - begin
        if ran.returncode:
            errors.seek(0)
            raise RuntimeError(f"{command[:3]}: {errors.read()[-2000:].decode(errors='replace')}")
    return written, ended


def _compile(command: list[str], environment: dict[str, str]) -> float:
    """Seconds that all programs of a process took to compile; 0 where nothing is compiled."""
    done = subprocess.run([*command, "--timing", "--json"], capture_output=True, check=True,
                          env=environment)  # fmt: skip
    return float(json.loads(done.stdout)["timing_ms"].get("compile", 0.0)) / 1e3


# -- models on the disk ----------------------------------------------------------------------------

BARS = {"qwen3-0.6b": 1200.0, "qwen3-4b": 3500.0}  # ms, of "again"
LOAD = 5.0  # GB/s
AGAIN = 5  # processes that find the caches filled
GENERATE = "from centella.cli import main; main()"
TRANSCRIBE = """
import sys, centella as ct
folder, device, file = sys.argv[1:]
print(ct.load(folder, device).transcribe(file, language="en", temperature=0.0, max_new_tokens=60,
      compression_ratio_threshold=None, logprob_threshold=None, no_speech_threshold=None).text)
"""
PEER_GENERATE = """
import sys, torch, transformers as t
folder, text = sys.argv[1:]
ids = t.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids.cuda()
m = t.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
print(m.generate(ids, max_new_tokens=1, pad_token_id=0).tolist())
"""
PEER_TRANSCRIBE = """
import sys, wave, numpy as np, torch, transformers as t
folder, file = sys.argv[1:]
m = t.AutoModelForSpeechSeq2Seq.from_pretrained(folder, dtype=torch.float16, device_map="cuda")
with wave.open(file) as w:
    sound = np.frombuffer(w.readframes(w.getnframes()), np.int16) / np.float32(32768)
f = t.WhisperFeatureExtractor(feature_size=m.config.num_mel_bins)
mel = f(sound, sampling_rate=16000, return_tensors="pt").input_features.half().cuda()
print(m.generate(mel, max_new_tokens=60, language="en", task="transcribe").tolist())
"""


def first(args: argparse.Namespace) -> Iterator[Row]:
    """Milliseconds from the start of a process until one token, or a window's text, is written.

    Rows "and the end" are until the process has ended.
    """
    small = "qwen3-mini,whisper-mini"
    default = "qwen3-0.6b,qwen3-4b,whisper-tiny,whisper-large-v3"
    for kind in (args.shapes or (small if args.small else default)).split(","):
        dtype = "f16" if kind.startswith("whisper") else "bf16"
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / kind
            seconds, size = write(kind, folder, dtype)
            yield {"bench": f"{kind}, written", "who": "transformers", "unit": "s", "shape": [1],
                   "gigabytes": size, **cost([seconds], 1.0)}  # fmt: skip
            sound = folder / "sound.wav"
            write_wav(sound, 4 if args.small else 30)
            yield from _first(args, kind, folder, sound)
            if not kind.startswith("whisper"):
                yield from _loaded(args, kind, folder)


def _loaded(args: argparse.Namespace, kind: str, folder: Path) -> Iterator[Row]:
    """Gigabytes a second from the page cache to the device, and seconds with quantising.

    Of the folder as it is, and of its config and weights alone.
    """
    files = [*folder.glob("*.safetensors*")]  # and their index
    gigabytes = sum(file.stat().st_size for file in files) / 1e9
    with tempfile.TemporaryDirectory() as temporary:
        alone = Path(temporary)
        for file in (*files, folder / "config.json"):
            (alone / file.name).symlink_to(file)
        ways = ((folder, None, "loaded"), (alone, None, "loaded without a tokenizer"),
                *((folder, q, f"{q} at load") for q in ("q8_0", "q4_0")))  # fmt: skip
        for name, (where, quantize, bench) in product(args.devices, ways):
            device = ct.device(name)
            load = partial(ct.load, where, device, quantize=quantize, task="generate")
            seconds = timed(load, 1 if args.small else AGAIN, device.synchronize)
            row: Row = {"who": name, "shape": [1], "bench": f"{kind}, {bench}"}
            if quantize is not None:
                yield {**row, "unit": "s", **cost(seconds, 1.0)}
            else:
                bar = {"bar": LOAD} if name.startswith("cuda") else {}
                yield {**row, **bar, "unit": "GB/s", **summary(seconds, gigabytes)}


def _first(args: argparse.Namespace, kind: str, folder: Path, sound: Path) -> Iterator[Row]:
    speech, text = kind.startswith("whisper"), " ".join(words(16))
    what = "first text" if speech else "first token"
    with tempfile.TemporaryDirectory() as code:
        environment = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = code
        for name in args.devices:
            command = (
                [TRANSCRIBE, str(folder), name, str(sound)] if speech else
                [GENERATE, "generate", text, "--model", str(folder), "--device", name,
                 "--max-tokens", "1", "--ignore-eos"]
            )  # fmt: skip
            command = [sys.executable, "-c", *command]
            _process([sys.executable, "-c", "import centella.cli"], environment)  # its byte code
            with tempfile.TemporaryDirectory() as caches:
                there = {**environment, **dict.fromkeys(CACHES, caches)}
                times = [
                    _first_output(command, there) for _ in range(2 if args.small else 1 + AGAIN)
                ]
            base: Row = {"who": name, "unit": "ms", "shape": [1]}
            bar = {"bar": BARS[kind]} if kind in BARS and name.startswith("cuda") else {}
            yield from _written_and_ended(base, f"{kind}, {what}", times[:1], {})
            yield from _written_and_ended(base, f"{kind}, {what}, again", times[1:], bar)
        if torch_or_none() is not None:
            peer = [PEER_TRANSCRIBE, str(folder), str(sound)] if speech else [
                PEER_GENERATE, str(folder), text]  # fmt: skip
            try:
                command = [sys.executable, "-c", *peer]
                times = [_first_output(command, environment) for _ in range(2)]
            except RuntimeError as error:
                print(f"transformers: skipped, {error}")
                return
            base = {"who": "transformers", "unit": "ms", "shape": [1]}
            yield from _written_and_ended(base, f"{kind}, {what}, again", times[1:], {})


def _written_and_ended(
    base: Row, bench: str, times: list[tuple[float, float]], bar: Row
) -> Iterator[Row]:
    written, ended = zip(*times, strict=True)
    yield {**base, "bench": bench, **cost(written, 1e3), **bar}
    yield {**base, "bench": f"{bench}, and the end", **cost(ended, 1e3)}
