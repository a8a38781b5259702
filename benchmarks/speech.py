"""Whisper in released shapes on random weights: a window's encoder, and decoding.

Decoding is what `Transcriber` runs: a replay a token, with the rules of times, one token ahead. The
limit is the bytes of the decoder's weights and of the sound's keys and values at the rate at which
the card reads. A window's text by greedy tokens and by beams are timed in turn, each from its
prompt to its last token on the host. Peers: transformers on the same shapes, greedy, as it is and
compiled over keys and values of a fixed length, where torch has a GPU. A peer that fails costs its
own row.
Source of the sizes: config.json of whisper-tiny, -large-v3 and -large-v3-turbo.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from measure import READ, Row, alternate, cost, summary, timed, torch_or_none
from random_weights import activations_of, fill, kind_of

import centella as ct
from centella.audio.log_mel import log_mel
from centella.models.whisper import WhisperConfig, WhisperModel
from centella.tasks.transcribe.beams import Beams
from centella.tasks.transcribe.rules import Vocabulary
from centella.tasks.transcribe.session import SpeechSession

SIZES = {  # mels, width, heads, inner, encoder layers, decoder layers, vocabulary, positions
    "mini": (80, 64, 2, 128, 2, 2, 600, 100),
    "tiny": (80, 384, 6, 1536, 4, 4, 51865, 1500),
    "turbo": (128, 1280, 20, 5120, 32, 4, 51866, 1500),
    "large-v3": (128, 1280, 20, 5120, 32, 32, 51866, 1500),
}
TOKENS, ROUNDS = 60, 3
IN_TURN = 9  # rounds of greedy texts and of beams, in turn
BEAM, BAR = 5, 1.4  # texts that are followed at once; and what that may take of greedy's time
STATES, DECODE = "window to states", "decode"
BARS = {  # of large-v3: kind of device, bench, batch
    ("cuda", STATES, 1): 4.6, ("cuda", STATES, 8): 33.0, ("cuda", DECODE, 1): 1000.0,
    ("webgpu", DECODE, 1): 400.0,
}  # fmt: skip


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


def model_of(size: str, device: ct.Device, dtype: str) -> WhisperModel:
    """A model with random weights."""
    kind, format = kind_of(dtype)
    model = WhisperModel(WhisperConfig.from_dict(values_of(size)), activations_of(device, kind))
    fill(model, device, kind, format)
    return model


def vocabulary_of(size: str) -> Vocabulary:
    """Special tokens at the end of the vocabulary, 1 501 times among them."""
    vocab = SIZES[size][6]
    first = vocab - 1501 if vocab > 2000 else vocab - 101
    return Vocabulary(vocab, first - 107, first - 106, first - 1, first - 3, first - 2,
                      {"en": first - 105}, {"transcribe": first - 5})  # fmt: skip


def speech(args: argparse.Namespace) -> Iterator[Row]:
    """Encoder and decoder for each size, and of it for each device, dtype and batch; the peer."""
    sizes = args.shapes.split(",") if args.shapes else ["mini"] if args.small else [*SIZES][1:]
    batches = [int(n) for n in args.rows.split(",")]
    for size in sizes:
        for name, dtype in product(args.devices, (args.dtypes or "f16").split(",")):
            model = model_of(size, ct.device(name), dtype)
            for batch in batches:
                for row in measured(model, size, batch, args.small):
                    bar = BARS.get((name.partition(":")[0], str(row["bench"]), batch))
                    bars = {"bar": bar} if bar and size == "large-v3" else {}
                    yield {"who": f"{name} {dtype}", **bars, **row, "shape": (size, batch)}
            del model
        if (torch := torch_or_none()) is not None:
            for who, write in (("", written_by), (", compiled", compiled)):
                rows = peer(torch, size, batches, write)
                yield from attempted(f"transformers f16{who}", rows)


def measured(model: WhisperModel, size: str, batch: int, small: bool) -> Iterator[Row]:
    """Rows of a batch of windows: the encoder, sound to keys and values, then tokens and beams."""
    wait, c, vocabulary = model.device.synchronize, model.config, vocabulary_of(size)
    mel = ct.zeros((batch, c.num_mel_bins, c.frames), model.dtype, model.device)
    plan = model.device.compile(lambda: model.encode(mel))
    yield {"bench": STATES, "unit": "ms", **cost(timed(plan, ROUNDS, wait, 2), 1e3)}
    sound = np.random.default_rng(1).standard_normal((batch, c.frames * 160), np.float32) * 0.1
    session = session_of(model, vocabulary, batch)
    heard = timed(lambda: session.listen(sound), ROUNDS, wait)
    yield {"bench": "window to keys and values", "unit": "ms", **cost(heard, 1e3)}
    prompt = [vocabulary.start, vocabulary.languages["en"], vocabulary.tasks["transcribe"]]
    tokens = 8 if small else TOKENS

    def begin() -> None:
        session.start([prompt] * batch, 0, timed=True)

    def run() -> None:
        list(session.run(tokens))

    written = summary(timed(run, ROUNDS, wait, before=begin), batch * tokens)
    with ct.ledger(timing=True) as led:
        list(session.run(1))
    kernels = sorted(led.kernels(), key=lambda k: -(k.milliseconds or 0.0))
    weights = sum(t.nbytes for n, t in model.named_parameters() if n.startswith("decoder."))
    sounds = sum(plane.nbytes for pair in session.memory() for plane in pair)
    yield {
        "bench": DECODE, "unit": "tokens/s", **written,
        "share": (weights + sounds) * written["rate"] / batch / READ, "of": "the card's reads",
        "launches": led.launches,
        "kernels": [[k.kernel, k.launches, k.milliseconds] for k in kernels],
    }  # fmt: skip
    several = session_of(model, vocabulary, batch, BEAM)
    several.listen(sound)
    write = partial(Beams(several).write, prompt, 0, tokens, timed=True, no_repeat=0,
                    active=[True] * batch)  # fmt: skip
    lengths = {len(text) for text, _ in write().values()}

    def greedy() -> None:
        begin()
        run()

    took = alternate({"greedy": greedy, "beam": write}, 2 if small else IN_TURN, wait)
    whole, beam = (cost(seconds, 1e3) for seconds in took.values())
    yield {"bench": "greedy, a window's text", "unit": "ms", **whole}
    yield {
        "bench": f"beam {BEAM}, a window's text", "unit": "ms", "bar": BAR * whole["rate"],
        "of greedy": beam["rate"] / whole["rate"], "tokens": sorted(lengths), **beam,
    }  # fmt: skip


def session_of(
    model: WhisperModel, vocabulary: Vocabulary, batch: int, beam: int = 1
) -> SpeechSession:  # fmt: skip
    """A session that hears samples."""
    mels = model.config.num_mel_bins
    return SpeechSession(model, vocabulary, batch, lambda sound: log_mel(sound, mels), beam)


def peer_of(torch: Any, size: str) -> Any:
    """The model of transformers, f16, random weights."""
    import transformers

    values = values_of(size)
    del values["model_type"]
    config = transformers.WhisperConfig(**values, pad_token_id=0)
    with torch.device("cuda"):
        maker = transformers.WhisperForConditionalGeneration
        return maker._from_config(config, dtype=torch.float16).eval()


def written_by(torch: Any, model: Any, states: Any, tokens: int) -> None:
    """Greedy tokens of transformers' decoder from an encoder's states."""
    past, ids = None, torch.full((len(states), 1), 7, device=states.device)
    named = inspect.signature(model.forward).parameters
    kept = "cache" if "cache" in named else "past_key_values"  # before transformers 5.24
    for _ in range(tokens):
        out = model(
            encoder_outputs=(states,), decoder_input_ids=ids, use_cache=True, **{kept: past}
        )
        past, ids = getattr(out, kept), out.logits[:, -1:].argmax(-1)
    ids.cpu()


def compiled(torch: Any, model: Any, states: Any, tokens: int) -> None:
    """The same by its `generate`, which compiles steps over keys and values of a fixed length."""
    from transformers.generation.utils import GenerationMixin
    from transformers.modeling_outputs import BaseModelOutput

    begin = torch.full((len(states), 1), 7, device=states.device)
    GenerationMixin.generate(
        model, encoder_outputs=BaseModelOutput(last_hidden_state=states), decoder_input_ids=begin,
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=1,
        cache_implementation="static",
    ).cpu()  # fmt: skip


def attempted(who: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Rows of a peer, up to where it fails: that costs its own rows."""
    try:
        for row in rows:
            yield {"who": who, **row}
    except Exception as error:  # whatever a foreign library raises
        print(f"{who}: skipped, {type(error).__name__}: {str(error)[:300]}", flush=True)


def peer(torch: Any, size: str, batches: list[int], write: Any) -> Iterator[Row]:
    """transformers: the encoder, and greedy tokens from its states."""
    with torch.inference_mode():
        model, values = peer_of(torch, size), values_of(size)
        for batch in batches:
            mel = torch.randn(batch, values["num_mel_bins"], 2 * values["max_source_positions"],
                              device=model.device, dtype=model.dtype)  # fmt: skip
            states = model.model.encoder(mel).last_hidden_state
            base = {"shape": (size, batch)}
            if write is written_by:
                encode = timed(partial(model.model.encoder, mel), ROUNDS, torch.cuda.synchronize)
                yield {**base, "bench": STATES, "unit": "ms", **cost(encode, 1e3)}
            took = timed(partial(write, torch, model, states, TOKENS), ROUNDS, warm=3)
            yield {**base, "bench": DECODE, "unit": "tokens/s", **summary(took, batch * TOKENS)}
