"""Guessing tokens of repetitive text: tokens a second with prompt lookup, and without.

The model has a released shape and random weights, but the two products that end a layer's halves
are zero: what it writes is the token that it read last, again and again. So a text is repetitive
without training, and a step reads and computes all that it does in the real model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
from generate import TOKENS, model_of
from measure import Row, summary
from random_weights import ROWS, Weights

import centella as ct
from centella.models.llama import LlamaModel
from centella.tasks.generate import speculation as speculate
from centella.tasks.generate.pieces import Tally
from centella.tasks.generate.sampling import Sampling
from centella.tasks.generate.session import Session

PROMPT, ROUNDS = list(range(5, 69)), 4  # the first round warms up


def speculation(args: argparse.Namespace) -> Iterator[Row]:
    """A row of single steps and one with guesses, for each size and device."""
    sizes = args.shapes.split(",") if args.shapes else ["mini"] if args.small else ["4b", "0.6b"]
    tokens = 16 if args.small else 4 * TOKENS
    for size in sizes:
        for name in args.devices:
            model = repeating(size, ct.device(name), args.dtypes or "bf16")
            session = Session(model, 1, len(PROMPT) + tokens + speculate.GUESSES + 1)
            base: Row = {"bench": "decode, repetitive", "shape": (size, 1), "unit": "tokens/s"}
            plain, written, _ = timed(session, None, tokens)
            yield {**base, "who": name, **summary(plain, tokens)}
            guessed, same, tally = timed(session, speculate.Lookup(), tokens)
            yield {**base, "who": f"{name}, lookup", **summary(guessed, tokens),
                   "guessed": tally.guessed, "accepted": tally.accepted,
                   "same_tokens": written == same}  # fmt: skip


def repeating(size: str, device: ct.Device, dtype: str) -> LlamaModel:
    """A model whose layers add nothing to what they read, and whose tokens differ."""
    model = model_of(size, device, dtype)
    vocab, hidden = model.embed_tokens.weight.shape
    ids, weights, kind = np.arange(vocab), Weights(device, 1), model.embed_tokens.weight.dtype
    tables = (ct.asarray(weights.numbers(ROWS * hidden).reshape(ROWS, hidden), kind, device)
              for _ in range(2))  # fmt: skip
    halves = (ct.gather(table, ct.asarray(at.astype(np.int32), device=device))
              for table, at in zip(tables, (ids % ROWS, ids // ROWS), strict=True))  # fmt: skip
    model.embed_tokens.weight = sum(halves, start=0.0)
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight = ct.zeros(linear.weight.shape, linear.weight.dtype, device)
    return model


def timed(
    session: Session, guesser: speculate.Lookup | None, tokens: int
) -> tuple[list[float], list[int], Tally]:
    """Seconds of each round, the tokens of the last one, and its guesses."""
    seconds: list[float] = []
    for _ in range(ROUNDS):
        session.choose_by(Sampling(), [PROMPT])
        session.start([PROMPT])
        session.model.device.synchronize()
        tally, begin = Tally(), time.perf_counter()
        steps = (session.run(tokens) if guesser is None
                 else speculate.run(session, guesser, tokens, tally))  # fmt: skip
        for step in steps:
            session.add(step)
        seconds.append(time.perf_counter() - begin)
    return seconds[1:], session.rows[0][len(PROMPT) :], tally
