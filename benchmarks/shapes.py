"""Encoders in the shapes of released ones beside transformers, eager and compiled; reranking.

f16, random weights of one folder for both sides: ids on the host to vectors on the host; of the
reranker a question and documents, texts to scores. What `torch.compile` takes to compile is a row
of its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import peer_encode, words, written
from measure import Row, alternate, quantiles, summary, timed, torch_or_none

import centella as ct
from centella.tasks.embed.forward import Forward

SHAPES = {"bge-m3": (32, 512), "modernbert": (64, 512), "reranker": (100, 256)}
SMALL = {"bge-m3": (2, 16), "modernbert": (2, 16), "reranker": (3, 24)}
BAR = 2.0  # times the rate of what is compiled
ALIKE = 0.99
ROUNDS = 10
Runs = dict[str, Callable[[], Any]]


def shapes(args: argparse.Namespace) -> Iterator[Row]:
    """Texts a second of each shape and device, and of transformers."""
    torch = torch_or_none()
    sizes = SMALL if args.small else SHAPES
    for kind in args.shapes.split(",") if args.shapes else sizes:
        rows, length = sizes[kind]
        with written(kind, "f16", args.small) as folder:
            of_pairs = kind == "reranker"
            make = pairs if of_pairs else vectors
            runs, peers = make(args, folder, rows, length)
            if torch is not None:
                eager, compiled = peers(torch)
                runs["transformers"] = eager
                begin = time.perf_counter()
                try:
                    compiled()
                except Exception as error:  # the compiler's own, of any kind
                    print(f"torch.compile: skipped, {error!r:.300}")
                else:
                    took = time.perf_counter() - begin
                    yield {"bench": f"{kind}, compile", "shape": (rows, length), "unit": "s",
                           "who": "torch.compile", "rate": took, "worst_decile": took}  # fmt: skip
                    runs["torch.compile"] = compiled
            yield from compared(kind, runs, rows, length, min(args.rounds, ROUNDS))


def compared(kind: str, runs: Runs, rows: int, length: int, rounds: int) -> Iterator[Row]:
    """A row for each, with how alike what it gives is to the first; raises after the last one."""
    gave: dict[str, Any] = {}

    def keep(who: str) -> None:
        gave[who] = runs[who]()

    times = alternate({who: partial(keep, who) for who in runs}, rounds)
    first = gave[next(iter(gave))].astype(np.float64)
    bar = rows / float(np.median(times.get("torch.compile", [np.inf])))
    least = 1.0
    for who, seconds in times.items():
        other = gave[who].astype(np.float64)
        if first.ndim == 1:  # scores
            alike = 1.0 - float(np.abs(first - other).max())
        else:
            alike = float((first * other).sum(-1).min())
        least = min(least, alike)
        more = {"bar": BAR * bar} if bar and not who.startswith(("t", "cpu")) else {}
        yield {"bench": kind, "shape": (rows, length), "who": who, "unit": "texts/s", **more,
               "alike": alike, **summary(seconds, rows)}  # fmt: skip
    assert least > ALIKE, (kind, least)


def vectors(
    args: argparse.Namespace, folder: Path, rows: int, length: int
) -> tuple[Runs, Callable[[Any], Any]]:
    """Ids to vectors; and what makes transformers' two."""
    runs: Runs = {}
    for name in args.devices:
        model = ct.load(folder, device=name, dtype=args.dtypes or "f16", task="embed")
        high = model.model.config.vocab_size
        ids = np.random.default_rng(1).integers(10, high - 300, (rows, length), dtype=np.int32)
        runs[name] = partial(_fetched, Forward(model), ids)

    def peers(torch: Any) -> Any:
        from transformers import AutoModel

        model = AutoModel.from_pretrained(folder, dtype=torch.float16).to("cuda").eval()
        wide = torch.from_numpy(ids.astype(np.int64))

        def call(run: Any) -> Any:
            with torch.inference_mode():
                on_card = wide.cuda()
                states = run(input_ids=on_card, attention_mask=torch.ones_like(on_card))
                mean = states.last_hidden_state.float().mean(1)
                return torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()

        return partial(call, model), partial(call, torch.compile(model))

    return runs, peers


def _fetched(forward: Forward, ids: Any) -> Any:
    lengths = np.full(len(ids), ids.shape[1], np.int32)
    return forward.captured.fetch(ids, lengths, True, None).result()["dense"]


def pairs(
    args: argparse.Namespace, folder: Path, rows: int, length: int
) -> tuple[Runs, Callable[[Any], Any]]:
    """A question and documents to scores; pairs have `length` tokens, four special ones of them."""
    few = length // 8
    question = " ".join(words(few))
    documents = [" ".join(words(length - 4 - few, seed)) for seed in range(1, rows + 1)]
    both = [(question, document) for document in documents]
    runs: Runs = {}
    for name in args.devices:
        model = ct.load(folder, device=name, dtype=args.dtypes or "f16", task="classify")
        runs[name] = partial(model.predict, both, batch_size=rows, activation="sigmoid")

    def peers(torch: Any) -> Any:
        from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

        maker = AutoModelForSequenceClassification
        model = maker.from_pretrained(folder, dtype=torch.float16).to("cuda").eval()
        file = str(folder / "tokenizer.json")
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, pad_token="<pad>")

        def call(run: Any) -> Any:
            batch = tokenizer([question] * rows, documents, return_tensors="pt", padding=True,
                              truncation=True, max_length=512)  # fmt: skip
            with torch.inference_mode():
                logits = run(input_ids=batch["input_ids"].cuda(),
                             attention_mask=batch["attention_mask"].cuda()).logits  # fmt: skip
                return logits[:, 0].float().sigmoid().cpu().numpy()

        return partial(call, model), partial(call, torch.compile(model))

    return runs, peers


# -- one sentence ----------------------------------------------------------------------------------

SENTENCE = "the quiet engine walks over the mountain and the lamp answers early"
MANY = 1000  # calls, so that the slowest of a hundred is known


def sentence(args: argparse.Namespace) -> Iterator[Row]:
    """Milliseconds of one text to its vector, median and 99th percentile.

    In turn with the others, so that each call finds the host's caches filled by another program;
    then alone, one call after the other.
    """
    calls: dict[str, Any] = {}
    for name in args.devices:
        model = ct.load(args.model, device=name, dtype=args.dtypes or "f16", task="embed")
        calls[name] = partial(model.encode, SENTENCE)
    if (torch := torch_or_none()) is not None:
        calls["transformers"] = partial(peer_encode(torch, args.model), [SENTENCE])
    rounds = 20 if args.small else MANY
    for who, times in alternate(calls, rounds).items():
        yield {"bench": "one sentence, text to vector", "shape": (1,), "who": who, "unit": "ms",
               **quantiles(times)}  # fmt: skip
    for who, call in calls.items():
        yield {"bench": "the same, alone", "shape": (1,), "who": who, "unit": "ms",
               **quantiles(timed(call, rounds, warm=rounds // 5))}  # fmt: skip
