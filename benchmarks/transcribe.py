"""Files to text from end to end, how often faster than real time; log-mel spectrograms.

Ten minutes of syllables without sense, random f16 weights, 60 tokens of every window: reading the
file, finding speech, spectrograms, encoder, decoder, text. On a CPU one minute. Peers: the feature
extractor of transformers on the card, its encoder, and as many greedy tokens, in equal batches;
faster-whisper and, on a CPU, whisper.cpp (`pywhispercpp`) of the same shape, where they are
installed. A peer that fails costs its own row.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import wave
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import write, write_speech
from ggml import write_ggml
from measure import Call, Row, alternate, cost, summary, timed, torch_or_none
from sound import RATE, syllables, write_wav
from speech import SIZES, TOKENS, attempted, model_of, peer_of, vocabulary_of, written_by

import centella as ct
from centella.audio.log_mel import log_mel
from centella.tasks.text.tokenizer import Tokenizer
from centella.tasks.transcribe.options import SpeechConfig
from centella.tasks.transcribe.transcriber import Transcriber

SECONDS, BATCH, ROUNDS, MEL_BAR = 600, 16, 3, 10.0
BARS = {"large-v3": 800.0, "cpu tiny": 10.0}  # times real time


def transcribe(args: argparse.Namespace) -> Iterator[Row]:
    """Rows of each size and device, of transformers, and of the spectrogram."""
    default = "tiny,turbo,large-v3"
    sizes = (args.shapes or ("mini" if args.small else default)).split(",")
    with tempfile.TemporaryDirectory() as temporary:
        for size, name in product(sizes, args.devices):
            on_cpu = name == "cpu"
            seconds = 4 if args.small else 60 if on_cpu else SECONDS
            file = Path(temporary) / "sound.wav"
            write_wav(file, seconds)
            dtype = args.dtypes or ("f32" if on_cpu else "f16")
            batch = 1 if on_cpu else BATCH
            call = _ours(size, ct.device(name), dtype, file, seconds, batch, Path(temporary))
            bar = BARS.get(f"cpu {size}") if on_cpu else BARS.get(size)
            yield {**_row(size, batch, timed(call, ROUNDS), seconds), "who": f"{name} {dtype}",
                   **({"bar": bar} if bar else {})}  # fmt: skip
            peers = (("transformers", _transformers), ("faster-whisper", _faster_whisper))
            for who, peer in () if name.startswith("webgpu") else peers:
                yield from attempted(f"{who} {dtype}", peer(size, file, seconds, on_cpu, batch))
            if on_cpu and find_spec("pywhispercpp"):
                yield from attempted("whisper.cpp f16", _whisper_cpp(size, file, seconds))
    yield from spectrograms(args)


def _ours(
    size: str, device: ct.Device, dtype: str, file: Path, seconds: float, batch: int, folder: Path
) -> Call:  # fmt: skip
    """What transcribes the file, in all of which somebody speaks."""
    write_speech(folder, f"whisper-{size}")
    vocabulary = vocabulary_of(size)
    tokenizer = Tokenizer.from_folder(folder, vocabulary.size)
    model = Transcriber(model_of(size, device, dtype), tokenizer, SpeechConfig(vocabulary))

    def call() -> None:
        done: list[float] = []  # seconds, after each window
        model.transcribe(
            str(file), language="en", temperature=0.0, max_new_tokens=TOKENS, batch=batch,
            timestamps="segment" if batch > 1 else "none",  # which would move the next window
            condition_on_previous_text=False, compression_ratio_threshold=None,
            logprob_threshold=None, no_speech_threshold=None,
            progress=lambda seconds, _: done.append(seconds),
        )  # fmt: skip
        assert len(done) >= seconds / 30, f"{len(done)} windows of {seconds} s: no speech was heard"

    return call


def _transformers(
    size: str, file: Path, seconds: float, on_cpu: bool, batch: int
) -> Iterator[Row]:  # fmt: skip
    """transformers on the card, from the file to ids of tokens."""
    torch = torch_or_none()
    if torch is None or on_cpu:
        return
    from transformers import WhisperFeatureExtractor

    model, mels = peer_of(torch, size), SIZES[size][0]

    def call() -> None:
        with wave.open(str(file)) as read:
            samples = np.frombuffer(read.readframes(read.getnframes()), "<i2") / np.float32(32768)
        window = 30 * RATE
        windows = [samples[at : at + window] for at in range(0, len(samples), window)]
        extract = WhisperFeatureExtractor(feature_size=mels)
        for at in range(0, len(windows), batch):
            mel = extract(windows[at : at + batch], sampling_rate=RATE, return_tensors="pt",
                          device="cuda").input_features.to("cuda", torch.float16)  # fmt: skip
            written_by(torch, model, model.model.encoder(mel).last_hidden_state, TOKENS)

    with torch.inference_mode():
        yield _row(size, batch, timed(call, ROUNDS), seconds)


def _faster_whisper(
    size: str, file: Path, seconds: float, on_cpu: bool, batch: int
) -> Iterator[Row]:  # fmt: skip
    """faster-whisper, whose windows are those of the sound, without a detector of speech."""
    if not all(find_spec(name) for name in ("faster_whisper", "torch", "transformers")):
        return
    from ctranslate2.converters import TransformersConverter
    from faster_whisper import BatchedInferencePipeline, WhisperModel

    device, kind = ("cpu", "float32") if on_cpu else ("cuda", "float16")
    with tempfile.TemporaryDirectory() as temporary:
        folder, converted = Path(temporary) / "folder", str(Path(temporary) / "converted")
        write(f"whisper-{size}", folder, "f32" if on_cpu else "f16")
        maker = TransformersConverter(str(folder), copy_files=["tokenizer.json"])
        maker.convert(converted, quantization=kind)
        bands = json.dumps({"feature_size": SIZES[size][0]})
        (Path(converted) / "preprocessor_config.json").write_text(bands)
        model = BatchedInferencePipeline(WhisperModel(converted, device=device, compute_type=kind))
        windows = [{"start": float(at), "end": at + 30.0} for at in range(0, int(seconds), 30)]

        def call() -> list[int]:
            segments, _ = model.transcribe(
                str(file), language="en", batch_size=batch, max_new_tokens=TOKENS, beam_size=1,
                temperature=0.0, vad_filter=False, clip_timestamps=windows,
                without_timestamps=True, compression_ratio_threshold=None,
                log_prob_threshold=None, no_speech_threshold=None,
            )  # fmt: skip
            return [len(segment.tokens) for segment in segments]

        row = _row(size, batch, timed(call, ROUNDS), seconds)
        yield {**row, "tokens": sum(call()) / len(windows)}


def _whisper_cpp(size: str, file: Path, seconds: float) -> Iterator[Row]:
    """whisper.cpp on as many threads as there are cores, window after window, without times."""
    from pywhispercpp.model import Model

    mels, width, heads, _, encoder, decoder, *_ = SIZES[size]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model.bin"
        write_ggml(path, mels, width, heads, encoder, decoder)
        model = Model(
            str(path), n_threads=os.cpu_count(), redirect_whispercpp_logs_to=None, language="en",
            temperature=0.0, temperature_inc=0.0, max_tokens=TOKENS, no_timestamps=True,
            no_context=True, print_progress=False, print_realtime=False, print_timestamps=False,
        )  # fmt: skip
        row = _row(size, 1, timed(partial(model.transcribe, str(file)), ROUNDS), seconds)
        words = [len(segment.text.split()) for segment in model.transcribe(str(file))]
        yield {**row, "tokens": sum(words) / len(words)}


def _row(size: str, batch: int, took: list[float], seconds: float) -> Row:
    return {"bench": "file to text", "shape": (size, batch), "unit": "x real time",
            **summary(took, seconds)}  # fmt: skip


def spectrograms(args: argparse.Namespace) -> Iterator[Row]:
    """Milliseconds of the log-mel spectrogram of ten minutes, 128 bands; samples on the device."""
    windows = 1 if args.small else SECONDS // 30
    rows = syllables(2 if args.small else SECONDS).reshape(windows, -1)
    calls: dict[str, Any] = {}
    for name in args.devices:
        device = ct.device(name)
        samples = ct.asarray(rows, device=device)
        plan = device.compile(lambda x: log_mel(x, 128), samples)
        calls[name] = partial(_waited, partial(plan, samples), device.synchronize)
    if (torch := torch_or_none()) is not None:
        from transformers import WhisperFeatureExtractor

        extract = WhisperFeatureExtractor(feature_size=128)
        run = partial(extract, list(rows), sampling_rate=RATE, return_tensors="pt", device="cuda")
        calls["transformers, from the host"] = partial(_waited, run, torch.cuda.synchronize)
    for who, times in alternate(calls, min(args.rounds, 10)).items():
        bar = {} if who in ("cpu", "webgpu") or args.small else {"bar": MEL_BAR}
        yield {"bench": "log-mel", "shape": rows.shape, "who": who, "unit": "ms", **bar,
               **cost(times, 1e3)}  # fmt: skip


def _waited(run: Any, wait: Any) -> None:
    run()
    wait()
