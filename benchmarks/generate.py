"""Decoders of released shapes on random weights: prefill, tokens a second, and each kernel's share.

Weights of four layers take turns, so that no cache holds them and little is uploaded; a layer's
products read as many bytes as in the real model. A decode step is what `Generator` runs: a replay
that reads and writes the last token on the device. The limit is the bytes of the weights, and of
the keys and values so far, at the rate at which this card reads. `--prompt 512,8192,32768` are
lengths of the past, `--cache f,i8` what it is stored in: as activations, or in 8 bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
from measure import Row, cost, summary, torch_or_none

import centella as ct
from centella.dtypes import DType, dtype_of, f32, i8
from centella.models.llama import LlamaModel
from centella.models.llama_config import LlamaConfig
from centella.nn.module import Parameter
from centella.tasks.generate import Generator
from centella.tasks.sampling import GeneratorConfig, Sampling
from centella.tasks.session import Session

SIZES: dict[str, tuple[int, int, int, int, int, bool]] = {  # hidden, layers, heads, kv, inner, tied
    "mini": (64, 2, 4, 2, 128, True),
    "0.6b": (1024, 28, 16, 8, 3072, True),
    "1.7b": (2048, 28, 16, 8, 6144, True),
    "4b": (2560, 36, 32, 8, 9728, True),
    "8b": (4096, 36, 32, 8, 12288, False),
}
VOCAB, HEAD_DIM, LAYERS = 151936, 128, 4  # layers with weights of their own
PROMPT, TOKENS, ROUNDS = 512, 64, 3
READ = 4.39e12  # bytes a second of an H200


def values_of(size: str) -> dict[str, Any]:
    """Qwen3's config.json of that size."""
    hidden, layers, heads, kv, inner, tied = SIZES[size]
    return {
        "model_type": "qwen3", "vocab_size": 1000 if size == "mini" else VOCAB,
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": HEAD_DIM, "intermediate_size": inner,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "rope_theta": 1e6, "tie_word_embeddings": tied,
    }  # fmt: skip


def model_of(size: str, device: ct.Device, dtype: DType, activations: DType) -> LlamaModel:
    """A model with random weights; those of a layer are those of the fourth before it."""
    model = LlamaModel(LlamaConfig.from_dict(values_of(size)), activations)
    random = np.random.default_rng(0)
    block = (0.02 * random.standard_normal(1 << 22)).astype(np.float32)
    made: dict[tuple[str, int], Any] = {}

    def data(shape: tuple[int, ...], path: str) -> ct.Tensor:
        if len(shape) == 1 or "norms" in path:
            return ct.ones(shape, f32, device)
        flat = np.resize(np.roll(block, int(random.integers(1 << 20))), shape)
        return ct.asarray(flat, dtype, device)

    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if not isinstance(value, Parameter):
                continue
            parts = path.split(".")
            layer = int(parts[1]) % LAYERS if parts[0] == "layers" else -1
            key = (".".join(parts[2:] if layer >= 0 else parts) + name, layer)
            if key not in made:
                made[key] = data(value.shape, path)
            setattr(module, name, made[key])
    device.synchronize()
    return model


def weight_bytes(model: LlamaModel) -> int:
    """Bytes of weights that a token reads."""
    tied = model.config.tie_word_embeddings
    skipped = "" if tied else "embed_tokens.weight"
    return sum(t.nbytes for name, t in model.named_parameters() if name != skipped)


def generate(args: argparse.Namespace) -> Iterator[Row]:
    """Prefill and decode for each device, size, dtype and batch."""
    sizes = args.shapes.split(",") if args.shapes else ["mini"] if args.small else ["0.6b", "4b"]
    for name in args.devices:
        device = ct.device(name)
        for size in sizes:
            for dtype in (args.dtypes or "bf16").split(","):
                kind = dtype_of(dtype)
                wide = kind if device.caps.target == "ptx" else f32
                model = model_of(size, device, kind, wide)
                for batch, cache in product(map(int, args.rows.split(",")), args.cache.split(",")):
                    stored = i8 if cache == i8.name else None
                    rows = (
                        row
                        for prompt in prompts_of(args)
                        for row in measured(model, batch, args.small, prompt, stored)
                    )
                    for row in chain(rows, [served(model, batch, args.small, stored)]):
                        who = f"{name} {dtype}" + (f", cache {cache}" if stored else "")
                        yield {"who": who, **row, "shape": (size, batch)}
    if (torch := torch_or_none()) is not None and not args.prompt:
        for size, batch in product(sizes, map(int, args.rows.split(","))):
            for row in peer(torch, size, batch, args.compile):
                yield {**row, "shape": (size, batch)}


def peer(torch: Any, size: str, batch: int, compiled: bool) -> Iterator[Row]:
    """transformers' own `generate` in bf16, random weights; with a compiled step if asked for."""
    import transformers

    config = transformers.Qwen3Config(**{k: v for k, v in values_of(size).items()
                                         if k != "model_type"})  # fmt: skip
    with torch.device("cuda"):
        model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(0, config.vocab_size, (batch, PROMPT), device="cuda")

    def took(tokens: int, **options: Any) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens,
                       do_sample=False, pad_token_id=0, **options)  # fmt: skip
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    kinds = {"transformers bf16": {}, "transformers bf16, compiled": {
        "cache_implementation": "static"}}  # fmt: skip
    for who, options in list(kinds.items())[: 1 + compiled]:
        with torch.inference_mode():
            for _ in range(2):
                took(TOKENS, **options)
            first = [took(1, **options) for _ in range(ROUNDS)]
            more = [took(1 + TOKENS, **options) for _ in range(ROUNDS)]
        yield {"who": who, "bench": f"prefill {PROMPT}", "unit": "ms", **cost(first, 1e3)}
        begun = sorted(first)[len(first) // 2]
        yield {"who": who, "bench": "decode", "unit": "tokens/s",
               **summary([s - begun for s in more], batch * TOKENS)}  # fmt: skip


def prompts_of(args: argparse.Namespace) -> list[int]:
    """Lengths of the past that steps are measured behind."""
    default = "16" if args.small else str(PROMPT)
    return [int(n) for n in (args.prompt or default).split(",")]


def served(model: LlamaModel, batch: int, small: bool, stored: DType | None) -> Row:
    """Tokens a second of requests of many lengths, four for each row of a `Scheduler`'s steps."""
    random, (prompt, tokens) = np.random.default_rng(2), (16, 8) if small else (PROMPT, TOKENS)
    sizes = random.integers((prompt // 4, tokens // 4), (prompt, 2 * tokens), (4 * batch, 2))
    generator = Generator(model, Path("tokenizer.json"), GeneratorConfig())
    seconds = []
    with ct.Scheduler(
        generator, max_batch=batch, tokens=batch * (prompt + 2 * tokens),
        cache="i8" if stored else None,
    ) as scheduler:  # fmt: skip
        for _ in range(1 + ROUNDS):
            ids = [random.integers(0, model.config.vocab_size, n).tolist() for n, _ in sizes]
            begin = time.perf_counter()
            requests = [scheduler.submit(row, max_new_tokens=int(n))
                        for row, (_, n) in zip(ids, sizes, strict=True)]  # fmt: skip
            for request in requests:
                request.result()
            seconds.append(time.perf_counter() - begin)
        row = {"steps": scheduler.steps, "preemptions": scheduler.preemptions}
    written = summary(seconds[1:], int(sizes[:, 1].sum()))
    return {"bench": "served, prefill included", "unit": "tokens/s", **written, **row}


def measured(
    model: LlamaModel, batch: int, small: bool, prompt: int, stored: DType | None
) -> Iterator[Row]:
    """Rows of prefill, of greedy tokens with each kernel's share, and of sampled tokens."""
    tokens = 8 if small else TOKENS
    session = Session(model, batch, prompt + (2 * ROUNDS + 2) * tokens, stored)
    random = np.random.default_rng(1)
    ids = random.integers(0, model.config.vocab_size, (batch, prompt)).tolist()
    prefill: list[float] = []
    for _ in range(1 + ROUNDS):
        session.rows = [[] for _ in ids]  # nothing is kept
        model.device.synchronize()
        begin = time.perf_counter()
        session.start([[*row, 1] for row in ids])
        model.device.synchronize()
        prefill.append(time.perf_counter() - begin)
    yield {"bench": f"prefill {prompt}", "unit": "ms", **cost(prefill[1:], 1e3)}
    cache = session.past.cache
    token_bytes = cache.nbytes / (batch * cache.capacity)  # of keys and values of a token
    for how in (Sampling(), Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=1)):
        session.choose_by(how, ids)
        list(session.run(4))
        past = batch * token_bytes * (cache.length + ROUNDS * tokens / 2)
        nbytes = weight_bytes(model) + past
        seconds = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            list(session.run(tokens))
            seconds.append(time.perf_counter() - begin)
        behind = "" if prompt in (16, PROMPT) else f" after {prompt}"
        row = {"bench": f"decode{behind}" if how.greedy else f"decode, sampled{behind}",
               "unit": "tokens/s",
               **summary(seconds, batch * tokens)}  # fmt: skip
        if how.greedy:
            with ct.ledger(timing=True) as led:
                list(session.run(1))
            kernels = sorted(led.kernels(), key=lambda k: -k.milliseconds)
            row |= {"share": nbytes * row["rate"] / batch / READ, "of": "the card's reads",
                    "weights_gb": weight_bytes(model) / 1e9, "past_gb": past / 1e9,
                    "launches": led.launches,
                    "kernels": [[k.kernel, k.launches, k.milliseconds] for k in kernels],
                    }  # fmt: skip
        yield row
