"""Streamed products of one row beside the shipped ones: each shape, a chain, tokens a second.

    python benchmarks/run.py streams --devices cuda --shapes 4b,0.6b --rounds 5

Both take turns. Each shape is first compared with float64. Shapes are timed as 36 launches of a
replay that depend on each other, over the weights of four layers in turn; a chain has the four
products of nine times four layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from generate import LAYERS, PROMPT, model_of
from measure import READ, Row, alternate, error_of, fresh, summary

import centella as ct
from centella.ops.matmul import streamed
from centella.tasks.generate.sampling import Sampling
from centella.tasks.generate.session import Session
from centella.tensors.functional import linear, normed_linear

LAUNCHES, TOKENS, WORST = 36, 48, 0.01
CONFIGURATIONS = ("shipped", "thin")  # as it is chosen; no product is streamed


@contextmanager
def configured(device: ct.Device, name: str) -> Iterator[None]:
    """Plans of a configuration, while this is entered."""
    of = streamed.stream_of if name == "shipped" else lambda *_: None
    with mock.patch.object(streamed, "stream_of", of), fresh(device):
        yield


Product = Callable[[Any, Any], Any]  # of a layer and x


def qkv(layer: Any, x: Any) -> Any:
    return normed_linear(x, layer.self_attn.qkv.weight, layer.input_layernorm.scale)


def out(layer: Any, x: Any, residual: Any = None) -> Any:
    return linear(x, layer.self_attn.o_proj.weight, residual=residual)


def gate_up(layer: Any, x: Any) -> Any:
    return normed_linear(
        x, layer.mlp.gate_up.weight, layer.post_attention_layernorm.scale, gate="silu"
    )


def down(layer: Any, x: Any, residual: Any = None) -> Any:
    return linear(x, layer.mlp.down_proj.weight, residual=residual)


PRODUCTS: dict[str, Product] = {"qkv": qkv, "o": out, "gate_up": gate_up, "down": down}


def weight_of(name: str, layer: Any) -> Any:
    part = layer.self_attn if name in ("qkv", "o") else layer.mlp
    return getattr(part, {"qkv": "qkv", "o": "o_proj", "down": "down_proj"}.get(name, name)).weight


def wanted(name: str, layer: Any, x: Any, rows: Any) -> Any:
    """The product in float64, some outputs of it."""
    w = weight_of(name, layer)

    def of(at: Any) -> Any:
        return ct.gather(w, ct.asarray(at, "i32", w.device)).astype("f32").numpy().astype(float)

    if name in ("qkv", "gate_up"):
        x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6)  # the norm's weights are ones
    y = x @ of(rows).T
    if name == "gate_up":
        y = y / (1 + np.exp(-y)) * (x @ of(rows + w.shape[0] // 2).T)
    return y


def streams(args: argparse.Namespace) -> Iterator[Row]:
    """Rows of shapes, of chains and of tokens, for each size."""
    for size in (
        args.shapes.split(",") if args.shapes else ["mini"] if args.small else ["4b", "0.6b"]
    ):
        for device_name in args.devices:
            device = ct.device(device_name)
            yield from _of(model_of(size, device, "bf16"), size, device, args)


def _of(model: Any, size: str, device: Any, args: Any) -> Iterator[Row]:
    layers = model.layers[:LAYERS]
    random = np.random.default_rng(3)
    base: Row = {"shape": (size, 1)}
    for what, product in PRODUCTS.items():
        k = weight_of(what, layers[0]).shape[1]
        x = ct.asarray(random.standard_normal((1, k), np.float32), "bf16", device)
        n = weight_of(what, layers[0]).shape[0] // (2 if what == "gate_up" else 1)
        some = np.linspace(0, n - 1, 64).astype(np.int32)
        host = x.astype("f32").numpy().astype(float)
        right = wanted(what, layers[-1], host, some)
        nbytes = weight_of(what, layers[0]).nbytes * LAUNCHES
        calls: dict[str, Any] = {}
        for name in CONFIGURATIONS:
            with configured(device, name):
                replay = device.compile(partial(_each, product, layers, x))
                got = replay()[-1].astype("f32").numpy()[:, some]
            error = error_of(got, right)
            assert error < WORST, (what, name, error)
            calls[name] = _waited(replay, device)
        yield from _rows(f"product {what}", base, calls, nbytes, args.rounds, LAUNCHES)
    yield from _head(model, base, device, args)
    calls = {}
    nbytes = sum(weight_of(w, layers[0]).nbytes for w in PRODUCTS) * LAUNCHES
    hidden = model.config.hidden_size
    x = ct.asarray(random.standard_normal((1, hidden), np.float32), "bf16", device)
    width = weight_of("o", layers[0]).shape[1]

    def chain() -> Any:
        y = x
        for i in range(LAUNCHES):
            layer = layers[i % len(layers)]
            y = out(layer, qkv(layer, y)[:, :width], y)
            y = down(layer, gate_up(layer, y), y)
        return y

    first: Any = None
    for name in CONFIGURATIONS:
        with configured(device, name):
            replay = device.compile(chain)
            got = replay().astype("f32").numpy()
        first = got if first is None else first
        print(f"  chain {name}: differs from {CONFIGURATIONS[0]} by {error_of(got, first):.4f}")
        calls[name] = _waited(replay, device)
    yield from _rows("chain of products", base, calls, nbytes, args.rounds, 4 * LAUNCHES)
    yield from _tokens(model, base, device, args)


def _each(product: Product, layers: Any, x: Any) -> list[Any]:
    return [product(layers[i % len(layers)], x) for i in range(LAUNCHES)]


def _head(model: Any, base: Row, device: Any, args: Any) -> Iterator[Row]:
    """The logits, four times; of 151936 outputs some are compared with float64."""
    w, hidden = model.embed_tokens.weight, model.config.hidden_size
    x = ct.asarray(
        np.random.default_rng(4).standard_normal((1, hidden), np.float32), "bf16", device
    )
    some = np.linspace(0, w.shape[0] - 1, 64).astype(np.int32)
    host = x.astype("f32").numpy().astype(float)
    host = host / np.sqrt(np.mean(host * host, -1, keepdims=True) + 1e-6)
    rows = ct.gather(w, ct.asarray(some, "i32", device)).astype("f32").numpy().astype(float)
    right, calls = host @ rows.T, {}
    for name in CONFIGURATIONS:
        with configured(device, name):
            replay = device.compile(lambda: [model.head(x) for _ in range(4)])
            got = replay()[-1].numpy()[:, some]
        error = error_of(got, right)
        assert error < WORST, ("head", name, error)
        calls[name] = _waited(replay, device)
    yield from _rows("product head", base, calls, 4 * w.nbytes, args.rounds, 4)


def _waited(replay: Any, device: Any, times: int = 4) -> Callable[[], None]:
    def call() -> None:
        for _ in range(times):
            replay()
        device.synchronize()

    return call


def _rows(
    bench: str, base: Row, calls: dict[str, Any], nbytes: float, rounds: int, launches: int
) -> Iterator[Row]:
    for who, seconds in alternate(calls, rounds).items():
        best = min(seconds) / 4
        yield {"bench": bench, "who": who, "unit": "TB/s", **base,
               **summary([s / 4 for s in seconds], nbytes / 1e12), "share": nbytes / best / READ,
               "us_a_launch": 1e6 * best / launches,
               "beyond_us": 1e6 * (best - nbytes / READ) / launches}  # fmt: skip


def _tokens(model: Any, base: Row, device: Any, args: Any) -> Iterator[Row]:
    prompt = 16 if args.small else PROMPT
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, (1, prompt)).tolist()
    sessions: dict[str, Session] = {}
    texts: dict[str, list[Any]] = {}
    for name in CONFIGURATIONS:
        with configured(device, name):
            session = sessions[name] = Session(model, 1, prompt + (args.rounds + 8) * TOKENS)
            session.start(ids)
            session.choose_by(Sampling(), ids)
            texts[name] = [int(np.ravel(t)[0]) for t in session.run(TOKENS)]
        same = sum(a == b for a, b in zip(texts[name], texts[CONFIGURATIONS[0]], strict=True))
        print(f"  tokens {name}: {same} of {TOKENS} as {CONFIGURATIONS[0]}'s")
    calls = {name: (lambda s=s: list(s.run(TOKENS))) for name, s in sessions.items()}
    for who, seconds in alternate(calls, args.rounds).items():
        yield {"bench": "decode", "who": who, "unit": "tokens/s", **base,
               **summary(seconds, TOKENS), "best": TOKENS / min(seconds)}  # fmt: skip
    for name in CONFIGURATIONS:
        with ct.ledger(timing=True) as led:
            list(sessions[name].run(1))
        kernels = sorted(led.kernels(), key=lambda k: -(k.milliseconds or 0.0))
        print(f"  {name}: " + ", ".join(f"{k.kernel} {k.launches} x {k.milliseconds:.3f} ms"
                                        for k in kernels if k.milliseconds))  # fmt: skip
