"""`sample` on devices against its NumPy formula, and the formula against probabilities."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.op.op import get
from centella.ops import sample, sample_row
from centella.tensors.tensor import apply_all

EVERY = ("simulator", "webgpu", "webgpu-minimum", "webgpu-hardware", "cuda")
PLAIN = (1.0, 0.0, 1.0, np.inf, 1.0, 0.0, 0.0)
SETTINGS: dict[str, dict[str, float]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.5},
    "top_k": {"top_k": 7},
    "top_k 1": {"top_k": 1},
    "top_k of all": {"top_k": 1e6},
    "top_p": {"top_p": 0.5},
    "least top_p": {"top_p": 1e-6},
    "min_p": {"gap": 2.0},
    "penalties": {"repetition": 1.3, "frequency": 0.2, "presence": 0.1},
    "all": {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "gap": 3.0, "repetition": 1.1},
}
MORE: tuple[dict[str, float], ...] = (
    {"top_k": 1, "top_p": 0.5}, {"top_k": 2.5}, {"top_k": 40, "temperature": 1e4},
    {"top_p": 0.0}, {"top_p": 0.999, "gap": 0.0}, {"temperature": 1e-3, "top_p": 0.9},
    {"temperature": 0.0, "repetition": 2.0, "presence": -1.0}, {"gap": 100.0, "frequency": 3.0},
)  # fmt: skip
Array = np.ndarray[Any, Any]


def row_of(**changes: float) -> Array:
    return np.array(
        [changes.get(n, v) for n, v in zip(sample_row.SETTINGS, PLAIN, strict=True)], np.float32
    )


def run(
    device: ct.Device, logits: Array, settings: Array, counts: Array, steps: Array, seeds: Array,
    variant: str | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    states = [ct.State(a, device=device) for a in (counts, steps)]
    given = (ct.asarray(a, device=device) for a in (logits, settings, seeds))
    y = apply_all(get("sample"), (*(s.value for s in states), *given), {"variant": variant})[2]
    return y.numpy(), states[0].numpy(), states[1].numpy()


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    ("vocab", "variant"),
    [(1, None), (5, None), (256, None), (1003, None), (1, "slices"), (1003, "slices")],
)
def test_devices_choose_what_numpy_chooses(
    device: ct.Device, name: str, vocab: int, variant: str | None
) -> None:
    random, batch = np.random.default_rng(vocab), 3
    settings = np.tile(row_of(**SETTINGS[name]), (batch, 1))
    logits = (3 * random.standard_normal((batch, vocab))).astype(np.float32)
    _check(device, logits, settings, variant)


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("spread", [0.05, 2.0, 30.0])
def test_slices_leave_nothing_out(device: ct.Device, spread: float) -> None:
    """All settings at once, of flat and of steep rows; many logits are equal, some infinite."""
    every = np.stack([row_of(**changes) for changes in (*SETTINGS.values(), *MORE)])
    random = np.random.default_rng(int(spread))
    logits = (spread * random.standard_normal((len(every), 5003))).astype(np.float32)
    logits[:, ::3] = np.round(logits[:, ::3])
    logits[:, 700:1400], logits[::4, -1] = -np.inf, np.inf
    _check(device, logits, every, "slices")


def _check(device: ct.Device, logits: Array, settings: Array, variant: str | None) -> None:
    batch, vocab = logits.shape
    random = np.random.default_rng(vocab)
    counts = random.integers(0, 3, (batch, vocab)).astype(np.int32)
    counts[:, ::7] |= np.int32(-(1 << 31))  # in the prompt
    steps, seeds = (random.integers(0, 1 << 20, batch).astype(np.int32) for _ in range(2))
    chosen, after, stepped = run(device, logits, settings, counts, steps, seeds, variant)
    with np.errstate(invalid="ignore"):
        wanted = [
            sample.choose(
                sample.penalised(logits[i], counts[i], each) if (each[4:] != (1, 0, 0)).any()
                else logits[i],
                each, int(steps[i]), int(seeds[i]),
            )
            for i, each in enumerate(settings)
        ]  # fmt: skip
    assert chosen.tolist() == wanted
    counts[range(batch), wanted] += 1
    np.testing.assert_array_equal(after, counts)
    np.testing.assert_array_equal(stepped, steps + 1)


@pytest.mark.devices("cpu", *EVERY)
def test_nan_is_no_token(device: ct.Device) -> None:
    logits = np.zeros((2, 300), np.float32)
    logits[1, 77] = np.nan
    counts, zeros = np.zeros((2, 300), np.int32), np.zeros(2, np.int32)
    for settings in (row_of(), row_of(temperature=0.0), row_of(top_p=0.5, top_k=3)):
        chosen, after, _ = run(device, logits, np.tile(settings, (2, 1)), counts, zeros, zeros)
        assert chosen[0] >= 0
        assert chosen[1] == -1
        assert after[1].sum() == 0


@pytest.mark.devices("cpu", *EVERY)
def test_infinities_and_equal_logits(device: ct.Device) -> None:
    logits = np.full((3, 40), -np.inf, np.float32)
    logits[0, 11] = 1.0
    logits[1, [3, 30]] = 2.0
    logits[2, :] = -3.0e38
    counts, zeros = np.zeros((3, 40), np.int32), np.zeros(3, np.int32)
    chosen, _, _ = run(device, logits, np.tile(row_of(top_k=1), (3, 1)), counts, zeros, zeros)
    assert chosen[0] == 11
    assert chosen[1] in (3, 30)
    chosen, _, _ = run(device, logits, np.tile(row_of(temperature=0), (3, 1)), counts, zeros, zeros)
    assert chosen.tolist() == [11, 3, 0]


@pytest.mark.devices("cpu", *EVERY)
@pytest.mark.parametrize("name", ["plain", "greedy", "top_k", "top_p", "all"])
def test_infinite_logits(device: ct.Device, name: str) -> None:
    """One of +inf is certain; where all are -inf, all are equal."""
    logits = np.zeros((2, 600), np.float32)
    logits[0, 500] = np.inf
    logits[1, :] = -np.inf
    settings = np.tile(row_of(**{**SETTINGS[name], "repetition": 1.0}), (2, 1))
    counts, zeros = np.zeros((2, 600), np.int32), np.zeros(2, np.int32)
    chosen, _, _ = run(device, logits, settings, counts, zeros, zeros)
    assert chosen[0] == 500
    wanted = sample.choose(logits[1], settings[1], 0, 0)
    assert chosen[1] == wanted >= 0


def test_it_draws_from_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "noise", cache(sample.noise))  # the same for all settings
    p = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(p).astype(np.float32)

    def drawn(**settings: float) -> Array:
        rounds = 20_000
        row = row_of(**settings)
        tokens = [sample.choose(logits, row, step, 5) for step in range(rounds)]
        return np.bincount(tokens, minlength=4) / rounds

    np.testing.assert_allclose(drawn(), p, atol=0.01)
    np.testing.assert_allclose(drawn(top_k=2), [0.625, 0.375, 0, 0], atol=0.01)
    np.testing.assert_allclose(drawn(top_p=0.9), p * [1, 1, 1, 0] / 0.95, atol=0.01)
    np.testing.assert_allclose(drawn(top_p=0.7), [0.625, 0.375, 0, 0], atol=0.01)
    np.testing.assert_allclose(drawn(gap=-np.log(0.2)), p * [1, 1, 1, 0] / 0.95, atol=0.01)
    squared = p**2 / (p**2).sum()
    np.testing.assert_allclose(drawn(temperature=0.5), squared, atol=0.01)
