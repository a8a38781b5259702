"""`Scheduler`: each request gets what it gets alone, whoever comes and goes beside it."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.errors import ContractError, DTypeError, ShapeError
from centella.tasks.load import load
from tests.support.model_common import DATA

Array = np.ndarray[Any, Any]
Prompts = list[list[int]]
BLOCK = 64


@functools.cache
def generator(device: ct.Device, name: str = "qwen3", dtype: str = "f32") -> ct.Generator:
    """A small decoder with room for several blocks a sequence."""
    pytest.importorskip("tokenizers")
    model = load(DATA / "decoders" / name, device, dtype)
    config = model.model.config
    model.model.config = replace(config, max_position_embeddings=512)
    return model  # type: ignore[no-any-return]


@pytest.fixture
def host() -> ct.Generator:
    return generator(ct.device("cpu"))


def chats(
    count: int, longest: int, most: int, seed: int = 0
) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of random lengths, a third of which begin alike; greedy and sampled."""
    rng = np.random.default_rng(seed)
    common = rng.integers(3, 200, longest).tolist()
    made: list[tuple[list[int], dict[str, Any]]] = []
    for i in range(count):
        ids = rng.integers(3, 200, rng.integers(1, longest)).tolist()
        if i % 3 == 0:
            ids = [*common[: 2 * len(common) // 3], *ids[: longest // 3]]
        options: dict[str, Any] = {"max_new_tokens": int(rng.integers(1, most)), "ignore_eos": True}
        if i % 2:
            options |= {"temperature": 1.0, "seed": i, "top_k": 30, "top_p": 0.95}
        if i % 4 == 3:
            options |= {"repetition_penalty": 1.2, "presence_penalty": 0.1}
        made.append((ids, options))
    return made


def run(
    scheduler: ct.Scheduler, asked: list[tuple[list[int], dict[str, Any]]]
) -> list[ct.Generation]:
    requests = [scheduler.submit(ids, **options) for ids, options in asked]
    scheduler.run()
    return [request.result() for request in requests]


def free(scheduler: ct.Scheduler) -> int:
    return scheduler._jobs.device.cache.blocks.free


@pytest.mark.devices("cpu", "webgpu", "webgpu-hardware", "cuda")
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen3-moe"])
def test_chats_get_what_they_get_alone(device: ct.Device, name: str) -> None:
    model = generator(device, name)
    asked = chats(*((40, 200, 30) if device.name == "cpu" else (9, 150, 12)))
    scheduler = ct.Scheduler(model, max_batch=8, tokens=1500, background=False)
    whole = free(scheduler)
    got = run(scheduler, asked)
    assert got == [model.generate(ids, **options) for ids, options in asked]
    assert scheduler.reused_tokens >= BLOCK
    assert (free(scheduler), scheduler.running, scheduler.waiting) == (whole, 0, 0)
    assert scheduler.steps < sum(len(g.ids) for g in got)
