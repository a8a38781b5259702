"""A model that is let go gives its memory back at once, without the garbage collector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import centella as ct
from tests.support.model_common import DATA

QWEN = "decoders/qwen3"
IDS = [1, 2, 3, 4, 1, 2, 3]
SOUND = np.random.default_rng(0).standard_normal(16_000).astype(np.float32) * 0.1
WRITTEN: dict[str, Any] = {  # what noise says, instead of nothing
    "language": "en", "temperature": 0.0, "no_speech_threshold": None, "vad": "off",
}  # fmt: skip


def scheduled(model: Any) -> None:
    with ct.Scheduler(model, max_batch=2, background=False) as scheduler:
        scheduler.submit(IDS, max_new_tokens=3).result()


USES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "greedy": (QWEN, lambda model: model.generate(IDS, max_new_tokens=3)),
    "drawn": (QWEN, lambda model: model.generate(IDS, max_new_tokens=3, temperature=1)),
    "beams": (QWEN, lambda model: model.generate(IDS, max_new_tokens=3, beam=2)),
    "lookup": (QWEN, lambda model: model.generate(IDS, max_new_tokens=3, draft="lookup")),
    "scheduled": (QWEN, scheduled),
    "transcribed": ("whisper/tiny", lambda model: model.transcribe(SOUND, **WRITTEN)),
    "beams of speech": ("whisper/tiny", lambda model: model.transcribe(SOUND, beam=2, **WRITTEN)),
}  # fmt: skip


@pytest.mark.devices("webgpu", "cuda")
def test_memory_comes_back(device: ct.Device, uncollected: None) -> None:
    for use, (folder, call) in USES.items():
        call(ct.load(DATA / folder, device=device))  # what the device keeps of any model
        before = device.memory.live
        model = ct.load(DATA / folder, device=device)
        call(model)
        assert device.memory.live > before, use
        del model
        assert device.memory.live == before, use


@pytest.mark.devices("webgpu", "cuda")
def test_an_index_gives_its_memory_back(device: ct.Device, uncollected: None) -> None:
    before = device.memory.live
    index = ct.Index(np.ones((300, 16), np.float32), device=device)
    index.search(np.ones((1, 16), np.float32), 3)
    assert device.memory.live > before
    del index
    assert device.memory.live == before
