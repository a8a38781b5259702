"""Whisper in released shapes on random weights: a window's encoder, and decoding.

Decoding is what `Transcriber` runs: a replay a token, with the rules of times, one token ahead. The
limit is the bytes of the decoder's weights and of the sound's keys and values at the rate at which
the card reads. Peer: transformers on the same shapes, greedy, where torch has a GPU.
Source of the sizes: config.json of whisper-tiny, -large-v3 and -large-v3-turbo.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from measure import Row, cost, summary, torch_or_none

import centella as ct
from centella.audio.log_mel import log_mel
from centella.dtypes import DType, dtype_of, f32
from centella.models.whisper import WhisperConfig, WhisperModel
from centella.nn.module import Parameter
from centella.tasks.rules import Vocabulary
from centella.tasks.speech_session import SpeechSession

SIZES = {  # mels, width, heads, inner, encoder layers, decoder layers, vocabulary, positions
    "mini": (80, 64, 2, 128, 2, 2, 600, 100),
    "tiny": (80, 384, 6, 1536, 4, 4, 51865, 1500),
    "turbo": (128, 1280, 20, 5120, 32, 4, 51866, 1500),
    "large-v3": (128, 1280, 20, 5120, 32, 32, 51866, 1500),
}
READ = 4.39e12  # bytes a second of an H200
TOKENS, ROUNDS = 60, 3


def values_of(size: str) -> dict[str, Any]:
    """config.json of that size."""
    mels, width, heads, inner, encoder, decoder, vocab, positions = SIZES[size]
    return {
        "model_type": "whisper", "num_mel_bins": mels, "d_model": width, "vocab_size": vocab,
        "encoder_attention_heads": heads, "decoder_attention_heads": heads,
        "encoder_ffn_dim": inner, "decoder_ffn_dim": inner, "encoder_layers": encoder,
        "decoder_layers": decoder, "max_source_positions": positions, "max_target_positions": 448,
        "activation_function": "gelu", "scale_embedding": False, "tie_word_embeddings": True,
    }  # fmt: skip


def model_of(size: str, device: ct.Device, dtype: DType, activations: DType) -> WhisperModel:
    """A model with random weights."""
    model = WhisperModel(WhisperConfig.from_dict(values_of(size)), activations)
    random = np.random.default_rng(0)
    block = (0.02 * random.standard_normal(1 << 22)).astype(np.float32)
    for _, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Parameter):
                flat = np.resize(np.roll(block, int(random.integers(1 << 20))), value.shape)
                kind = f32 if len(value.shape) == 1 else dtype
                setattr(module, name, ct.asarray(flat, kind, device))
    device.synchronize()
    return model


def vocabulary_of(size: str) -> Vocabulary:
    """Special tokens at the end of the vocabulary, 1 501 times among them."""
    vocab = SIZES[size][6]
    first = vocab - 1501 if vocab > 2000 else vocab - 101
    return Vocabulary(vocab, first - 107, first - 106, first - 1, first - 3, first - 2,
                      {"en": first - 105}, {"transcribe": first - 5})  # fmt: skip


def speech(args: argparse.Namespace) -> Iterator[Row]:
    """Encoder and decoder for each device, size, dtype and batch."""
    sizes = args.shapes.split(",") if args.shapes else ["mini"] if args.small else [*SIZES][1:]
    for name in args.devices:
        device = ct.device(name)
        for size in sizes:
            for dtype in (args.dtypes or "f16").split(","):
                kind = dtype_of(dtype)
                wide = kind if device.caps.target == "ptx" else f32
                model = model_of(size, device, kind, wide)
                for batch in map(int, args.rows.split(",")):
                    for row in measured(model, size, batch, args.small):
                        yield {"who": f"{name} {dtype}", **row, "shape": (size, batch)}
    if (torch := torch_or_none()) is not None:
        for size in sizes:
            for row in peer(torch, size, list(map(int, args.rows.split(",")))):
                yield {"who": "transformers f16", **row}


def measured(model: WhisperModel, size: str, batch: int, small: bool) -> Iterator[Row]:
    """Rows of a batch of windows: the encoder, sound to keys and values, then tokens."""
    yield {"bench": "window to states", "unit": "ms", **cost(encoded(model, batch), 1e3)}
    c, vocabulary = model.config, vocabulary_of(size)
    session = SpeechSession(model, vocabulary, batch, lambda sound: log_mel(sound, c.num_mel_bins))
    sound = np.random.default_rng(1).standard_normal((batch, c.frames * 160), np.float32) * 0.1
    heard: list[float] = []
    for _ in range(1 + ROUNDS):
        begin = time.perf_counter()
        session.listen(sound)
        model.device.synchronize()
        heard.append(time.perf_counter() - begin)
    yield {"bench": "window to keys and values", "unit": "ms", **cost(heard[1:], 1e3)}
    prompt = [vocabulary.start, vocabulary.languages["en"], vocabulary.tasks["transcribe"]]
    tokens, seconds = 8 if small else TOKENS, []
    for _ in range(1 + ROUNDS):
        session.start([prompt] * batch, 0, timed=True)
        model.device.synchronize()
        begin = time.perf_counter()
        list(session.run(tokens))
        seconds.append(time.perf_counter() - begin)
    written = summary(seconds[1:], batch * tokens)
    with ct.ledger(timing=True) as led:
        list(session.run(1))
    kernels = sorted(led.kernels(), key=lambda k: -k.milliseconds)
    weights = sum(t.nbytes for n, t in model.named_parameters() if n.startswith("decoder."))
    sounds = sum(both.nbytes for both in session.memory())
    yield {
        "bench": "decode", "unit": "tokens/s", **written,
        "share": (weights + sounds) * written["rate"] / batch / READ, "of": "the card's reads",
        "launches": led.launches,
        "kernels": [[k.kernel, k.launches, k.milliseconds] for k in kernels],
    }  # fmt: skip


def encoded(model: WhisperModel, batch: int) -> list[float]:
    """Seconds of the encoder, spectrograms and states on the device."""
    c = model.config
    mel = ct.zeros((batch, c.num_mel_bins, c.frames), model.dtype, model.device)
    plan = model.device.compile(lambda: model.encode(mel))
    seconds = []
    for _ in range(2 + ROUNDS):
        model.device.synchronize()
        begin = time.perf_counter()
        plan()
        model.device.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds[2:]


def peer(torch: Any, size: str, batches: list[int]) -> Iterator[Row]:
    """transformers: the encoder, and greedy tokens from its states."""
    import transformers

    values = values_of(size)
    config = transformers.WhisperConfig(**{k: v for k, v in values.items() if k != "model_type"})
    model = transformers.WhisperForConditionalGeneration(config).to("cuda", torch.float16).eval()
    for batch in batches:
        mel = torch.randn(batch, values["num_mel_bins"], 2 * values["max_source_positions"],
                          device="cuda", dtype=torch.float16)  # fmt: skip
        encode: list[float] = []
        write: list[float] = []
        with torch.inference_mode():
            for _ in range(1 + ROUNDS):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                states = model.model.encoder(mel)
                torch.cuda.synchronize()
                encode.append(time.perf_counter() - begin)
                begin = time.perf_counter()
                past, ids = None, torch.full((batch, 1), 7, device="cuda")
                for _ in range(TOKENS):
                    out = model(encoder_outputs=states, decoder_input_ids=ids,
                                past_key_values=past, use_cache=True)  # fmt: skip
                    past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
                ids.cpu()
                write.append(time.perf_counter() - begin)
        shape = (size, batch)
        yield {"bench": "window to states", "unit": "ms", "shape": shape, **cost(encode[1:], 1e3)}
        yield {"bench": "decode", "unit": "tokens/s", "shape": shape,
               **summary(write[1:], batch * TOKENS)}  # fmt: skip
