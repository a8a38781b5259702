"""Decoders of released shapes on random weights: prefill, tokens a second, and each kernel's share.

Weights of four layers take turns, so that no cache holds them and little is uploaded; a layer's
products read as many bytes as in the real model. A decode step is what `Generator` runs: a replay
that reads and writes the last token on the device. The limit is the bytes of the weights, and of
the keys and values so far, at the rate at which this card reads. `--prompt 512,8192,32768` are
lengths of the past, `--cache f,i8` what it is stored in: as activations, or in 8 bits. Of a mixture
of experts a token reads the chosen ones, several tokens those that random choices would name.
`--beam 4` has beam searches too, beside as many sampled rows, and the same of transformers.
Peers: transformers where torch has a GPU, and where the CPU is the only device; llama.cpp by
`run.py llama` (`peer_llama.py`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from measure import READ, Call, Row, alternate, cost, summary, timed, torch_or_none
from random_weights import activations_of, fill, kind_of

import centella as ct
from centella.dtypes import DType, i8
from centella.models.llama import LlamaModel
from centella.models.llama_config import LlamaConfig
from centella.nn import Linear
from centella.tasks.generate.generator import Generator
from centella.tasks.generate.sampling import GeneratorConfig, Sampling
from centella.tasks.generate.session import Session

SIZES: dict[str, tuple[int, int, int, int, int, bool]] = {  # hidden, layers, heads, kv, inner, tied
    "mini": (256, 2, 4, 2, 512, True),
    "0.6b": (1024, 28, 16, 8, 3072, True),
    "1.7b": (2048, 28, 16, 8, 6144, True),
    "4b": (2560, 36, 32, 8, 9728, True),
    "8b": (4096, 36, 32, 8, 12288, False),
}
EXPERTS: dict[str, tuple[int, int, int]] = {  # experts, those of a token, inner size of each
    "mini-moe": (8, 2, 64),
    "30b-a3b": (128, 8, 768),
}
SIZES |= {"mini-moe": SIZES["mini"], "30b-a3b": (2048, 48, 32, 4, 6144, False)}
VOCAB, HEAD_DIM, LAYERS = 151936, 128, 4  # layers with weights of their own
PROMPT, TOKENS, PEER_TOKENS, ROUNDS = 512, 64, 32, 3
TURN = 40  # tokens of a question in a chat
FEW = 16  # tokens that are generated on a CPU
MOST_ROWS = 8192  # of x, of the products that a prefill is compared with


def values_of(size: str) -> dict[str, Any]:
    """Qwen3's config.json of that size."""
    hidden, layers, heads, kv, inner, tied = SIZES[size]
    mixture: dict[str, Any] = {"model_type": "qwen3"}
    if size in EXPERTS:
        experts, picks, each = EXPERTS[size]
        mixture = {"model_type": "qwen3_moe", "num_experts": experts, "norm_topk_prob": True,
                   "num_experts_per_tok": picks, "moe_intermediate_size": each}  # fmt: skip
    return {
        **mixture, "vocab_size": 1000 if size.startswith("mini") else VOCAB,
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": HEAD_DIM, "intermediate_size": inner,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "rope_theta": 1e6, "tie_word_embeddings": tied,
    }  # fmt: skip


def model_of(size: str, device: ct.Device, dtype: str) -> LlamaModel:
    """A model with random weights; those of a layer are those of the fourth before it."""
    kind, format = kind_of(dtype)
    config = LlamaConfig.from_dict(values_of(size))
    model = LlamaModel(config, activations_of(device, kind))
    fill(model, device, kind, format, LAYERS)
    return model


def weight_bytes(model: LlamaModel, batch: int = 1) -> float:
    """Bytes of weights that a step reads; of experts, those that random choices name."""
    c = model.config
    skipped = "" if c.tie_word_embeddings else "embed_tokens.weight"
    chosen = 1 - (1 - c.num_experts_per_tok / max(1, c.num_experts)) ** batch
    return sum(t.nbytes * (chosen if ".experts." in name else 1.0)
               for name, t in model.named_parameters() if not _is(name, skipped))  # fmt: skip


def _is(name: str, parameter: str) -> bool:
    return bool(parameter) and name.startswith(parameter)  # the planes of a quantised one too


def generate(args: argparse.Namespace) -> Iterator[Row]:
    """Prefill and decode for each size, and of it for each device, dtype and batch; the peer."""
    sizes = args.shapes.split(",") if args.shapes else ["mini"] if args.small else ["0.6b", "4b"]
    batches = [int(n) for n in args.rows.split(",")]
    for size in sizes:
        for name, dtype in product(args.devices, (args.dtypes or "bf16").split(",")):
            model = model_of(size, ct.device(name), dtype)
            for batch, cache in product(batches, args.cache.split(",")):
                stored = i8 if cache == i8.name else None
                who = f"{name} {dtype}" + (f", cache {cache}" if stored else "")
                for prompt in prompts_of(args):
                    for row in measured(model, batch, args.small, prompt, stored):
                        yield {"who": who, **row, "shape": (size, batch)}
                if not args.prompt:
                    row = served(model, batch, args.small, stored)
                    yield {"who": who, **row, "shape": (size, batch)}
                if args.beam > 1:
                    for row in searched(model, batch, args.small, args.beam, stored):
                        yield {"who": who, **row, "shape": (size, batch)}
            del model
        where = "cpu" if args.devices == ["cpu"] else "cuda"
        if (torch := torch_or_none(where)) is not None and size not in EXPERTS:
            with torch.inference_mode():
                for dtype in ("f32", "bf16") if where == "cpu" else ("bf16",):
                    yield from peer(torch, size, args, where, dtype)


def peer(torch: Any, size: str, args: argparse.Namespace, where: str, dtype: str) -> Iterator[Row]:
    """transformers' own `generate`, random weights; with a compiled step if asked for."""
    import transformers

    config = transformers.Qwen3Config(**{k: v for k, v in values_of(size).items()
                                         if k != "model_type"})  # fmt: skip
    with torch.device(where):
        kind = torch.float32 if dtype == "f32" else torch.bfloat16
        model = transformers.Qwen3ForCausalLM._from_config(config, dtype=kind).eval()
    model.generation_config.eos_token_id = None
    name, batches, prompts = (
        f"transformers {dtype}",
        map(int, args.rows.split(",")),
        prompts_of(args),
    )
    kinds: dict[str, dict[str, Any]] = {name: {}, f"{name}, compiled": {
        "cache_implementation": "static"}}  # fmt: skip
    wait, tokens = (lambda: None, FEW) if where == "cpu" else (torch.cuda.synchronize, PEER_TOKENS)
    kinds = dict(list(kinds.items())[: 1 + args.compile])
    if args.beam > 1:
        kinds[f"{name}, {args.beam} beams"] = {"num_beams": args.beam}
    for batch, prompt, who in product(batches, prompts, kinds):
        ids = torch.randint(0, config.vocab_size, (batch, prompt), device=where)
        run = partial(
            model.generate, ids, attention_mask=torch.ones_like(ids), do_sample=False,
            pad_token_id=0, **kinds[who],
        )  # fmt: skip
        first = timed(partial(run, max_new_tokens=1), ROUNDS, wait)
        more = timed(partial(run, max_new_tokens=1 + tokens), ROUNDS, wait)
        base = {"who": who, "shape": (size, batch)}
        yield {**base, "bench": f"prefill {prompt}", "unit": "ms", **cost(first, 1e3)}
        begun = sorted(first)[len(first) // 2]
        yield {**base, "bench": f"decode{behind(prompt)}", "unit": "tokens/s",
               **summary([s - begun for s in more], batch * tokens)}  # fmt: skip
        if batch == 1 and prompt > PROMPT and len(kinds) == 1:
            past = transformers.DynamicCache()
            model(ids, past_key_values=past, logits_to_keep=1)
            turn = partial(model, ids[:, :TURN], past_key_values=past, logits_to_keep=1)
            seconds = timed(turn, 4 * ROUNDS, wait, before=partial(shorten, past, prompt))
            yield {**base, "bench": f"{TURN} more tokens after {prompt}", "unit": "ms",
                   **cost(seconds, 1e3)}  # fmt: skip


def shorten(past: Any, tokens: int) -> None:
    """Make a cache of transformers forget what it has behind so many tokens."""
    if past.get_seq_length() > tokens:
        past.crop(tokens - past.get_seq_length())


def prompts_of(args: argparse.Namespace) -> list[int]:
    """Lengths of the past that steps are measured behind."""
    default = "16" if args.small else str(PROMPT)
    return [int(n) for n in (args.prompt or default).split(",")]


def behind(prompt: int) -> str:
    """What the name of a row says of the past."""
    return "" if prompt in (16, PROMPT) else f" after {prompt}"


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


def searched(
    model: LlamaModel, batch: int, small: bool, beam: int, stored: DType | None
) -> Iterator[Row]:
    """Tokens a second of the texts that beam searches return; of as many rows that are drawn."""
    prompt, tokens = (16, 8) if small else (PROMPT, TOKENS)
    random, wait = np.random.default_rng(3), model.device.synchronize
    ids = random.integers(0, model.config.vocab_size, (batch, prompt)).tolist()
    generator = Generator(model, Path("tokenizer.json"), GeneratorConfig())
    kinds: dict[str, dict[str, Any]] = {
        f"decode, {beam} beams": {"beam": beam},
        f"decode, {beam} rows drawn": {"n": beam, "temperature": 0.8, "seed": 1},
    }
    for bench, how in kinds.items():
        run = partial(generator.generate, ids, cache="i8" if stored else None, **how)
        first = sorted(timed(partial(run, max_new_tokens=1), ROUNDS, wait))[ROUNDS // 2]
        more = timed(partial(run, max_new_tokens=1 + tokens), ROUNDS, wait)
        yield {"bench": bench, "unit": "tokens/s",
               **summary([s - first for s in more], batch * tokens)}  # fmt: skip


def measured(
    model: LlamaModel, batch: int, small: bool, prompt: int, stored: DType | None
) -> Iterator[Row]:
    """Rows of prefill, of greedy tokens with each kernel's share, of a step's host time, of sampled
    tokens, and of a chat's next question after a long text."""
    tokens, wait = 8 if small else TOKENS, model.device.synchronize
    tokens = min(tokens, FEW) if model.device.caps.on_host else tokens
    session = Session(model, batch, prompt + (2 * ROUNDS + 4) * tokens, stored)
    random = np.random.default_rng(1)
    ids = random.integers(0, model.config.vocab_size, (batch, prompt)).tolist()

    def prefill() -> None:
        session.rows = [[] for _ in ids]  # nothing is kept
        session.start([[*row, 1] for row in ids])

    contestants = {"prefill": prefill}
    if batch * prompt <= MOST_ROWS and not model.config.num_experts:
        contestants["products"] = products(model, batch * prompt)
    seconds = alternate({k: finished(call, wait) for k, call in contestants.items()}, 2 * ROUNDS)
    row = cost(seconds["prefill"], 1e3)
    if "products" in seconds:
        alone = 1e3 * float(np.median(seconds["products"]))
        row |= {"share": alone / row["rate"], "of": "its products' own rate",
                "products_ms": alone}  # fmt: skip
    yield {"bench": f"prefill {prompt}", "unit": "ms", **row}
    cache = session.past.cache
    token_bytes = cache.nbytes / (batch * cache.capacity)  # of keys and values of a token
    for how in (Sampling(), Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=1)):
        session.choose_by(how, ids)
        list(session.run(4))
        past = batch * token_bytes * (cache.length + ROUNDS * tokens / 2)
        weights = weight_bytes(model, batch)
        nbytes = weights + past
        seconds = timed(lambda: list(session.run(tokens)), ROUNDS, warm=0)
        name = "decode" if how.greedy else "decode, sampled"
        row = {"bench": f"{name}{behind(prompt)}", "unit": "tokens/s",
               **summary(seconds, batch * tokens)}  # fmt: skip
        if how.greedy:
            with ct.ledger(timing=True) as led:
                list(session.run(1))
            kernels = sorted(led.kernels(), key=lambda k: -(k.milliseconds or 0.0))
            if not model.device.caps.on_host:
                row |= {"share": nbytes * row["rate"] / batch / READ, "of": "the card's reads"}
            row |= {"weights_gb": weights / 1e9, "past_gb": past / 1e9,
                    "launches": led.launches,
                    "kernels": [[k.kernel, k.launches, k.milliseconds] for k in kernels],
                    }  # fmt: skip
        yield row
        if how.greedy:
            yield {"bench": f"host, a step{behind(prompt)}", "unit": "us",
                   **cost(host(session, tokens), 1e6)}  # fmt: skip
    if batch == 1 and prompt > PROMPT:
        further = random.integers(0, model.config.vocab_size, TURN).tolist()

        def turn() -> None:
            session.rows = [list(row) for row in ids]  # all of them are kept
            session.start([[*row, *further, 1] for row in ids])

        yield {"bench": f"{TURN} more tokens after {prompt}", "unit": "ms",
               **cost(timed(turn, 4 * ROUNDS, wait), 1e3)}  # fmt: skip


def host(session: Session, tokens: int) -> list[float]:
    """Seconds until the host has submitted a step, one step ahead of the device."""
    seconds, last = [], session.step()
    for _ in range(tokens):
        begin = time.perf_counter()
        ahead = session.step()
        seconds.append(time.perf_counter() - begin)
        last.result()
        last = ahead
    last.result()
    return seconds


def finished(call: Call, wait: Call) -> Call:
    """The same, until the device is done."""

    def run() -> None:
        call()
        wait()

    return run


def products(model: LlamaModel, rows: int) -> Call:
    """The products of all layers alone, each over so many rows of random numbers.

    They take turns with the prompt that they are compared with: for a tenth of a second a card at
    rest runs products at more power than it keeps up, so a few layers alone would seem faster.
    """
    layers = model.layers[:LAYERS]
    linears = [part for layer in layers for _, part in layer.named_modules()
               if isinstance(part, Linear)]  # fmt: skip
    # No row twice, as activations are: equal rows take less power, and products run faster.
    random = np.random.default_rng(4)
    inputs = {
        k: ct.asarray(random.standard_normal((rows, k), np.float32), model.dtype, model.device)
        for k in {part.weight.shape[1] for part in linears}
    }
    plan = model.device.compile(lambda: [part(inputs[part.weight.shape[1]]) for part in linears])

    def run() -> None:
        for _ in range(0, len(model.layers), len(layers)):
            plan()

    return run
