"""The ops of a beam search against searches that are written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.op.op import get
from centella.ops.beam import OUT
from centella.ops.speech_host import BEFORE, ENDED, LAST, NOTES, SEED, STEPS, WAS
from centella.tensors.tensor import apply_all

EVERY = ("cpu", "simulator", "webgpu", "webgpu-hardware", "cuda")
Array = np.ndarray[Any, Any]


def select(device: ct.Device, beam: int, *given: Array) -> list[Array]:
    """Tokens, parents and scores [prompts, beam]."""
    rows = len(given[0]) * beam
    states = [
        ct.State(np.full(rows, 7, t), device=device) for t in (np.int32, np.int32, np.float32)
    ]
    operands = (*(s.value for s in states), *(ct.asarray(x, device=device) for x in given))
    apply_all(get("beam_select"), operands, {})
    return [state.numpy().reshape(-1, beam) for state in states]


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize(("prompts", "beam", "vocab", "count"), [(1, 1, 3, 2), (3, 4, 31, 12)])
def test_the_best_that_have_not_ended_go_on(
    device: ct.Device, prompts: int, beam: int, vocab: int, count: int
) -> None:
    rng = np.random.default_rng(vocab)
    best = -np.sort(rng.random((prompts, count)), 1).astype(np.float32)
    which = rng.permuted(np.tile(np.arange(beam * vocab), (prompts, 1)), axis=1)[:, :count]
    ends = (np.arange(vocab) % 3 == 1).astype(np.int32)
    tokens, parents, running = select(device, beam, best, which.astype(np.int32), ends)
    for p in range(prompts):
        alive = [i for i in range(count) if not ends[which[p, i] % vocab]]
        rest = [i for i in range(count) if i not in alive]
        for b, i in enumerate([*alive, *rest][:beam]):
            assert (tokens[p, b], parents[p, b] - p * beam) == divmod(which[p, i], vocab)[::-1]
            assert running[p, b] == (best[p, i] if i in alive else best[p, i] + np.float32(OUT))


@pytest.mark.devices(*EVERY)
def test_what_is_nan_goes_on_from_a_beam_that_there_is(device: ct.Device) -> None:
    """So that no step reads outside of its tables before the host has seen the scores."""
    best = np.full((2, 6), np.nan, np.float32)
    which = np.tile(np.arange(6, dtype=np.int32), (2, 1))
    for ends in ([0, 0, 0], [1, 1, 1]):
        tokens, parents, running = select(device, 3, best, which, np.array(ends, np.int32))
        assert parents.tolist() == [[0, 0, 0], [3, 3, 3]]
        assert tokens.tolist() == [[0, 1, 2]] * 2
        assert np.isnan(running).all()


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize(("prompts", "beam", "size"), [(1, 1, 2), (2, 3, 4), (1, 5, 1), (2, 16, 3)])
def test_each_beam_keeps_the_past_that_it_goes_on_from(
    device: ct.Device, prompts: int, beam: int, size: int
) -> None:
    """Many steps: tables and copies leave in each beam's blocks what was written along its past."""
    rng, steps, first = np.random.default_rng(beam), 11, 2
    rows, width = prompts * beam, -(-(first + steps) // size)
    pool = np.full((rows * width + 1, size), -1)
    table = np.zeros((rows, 1 + width), np.int32)
    table[:, 1:] = 1 + rng.permutation(rows * width).reshape(rows, width)
    table[:, 0] = first - 1
    pasts: list[list[int]] = [[-7, -8] for _ in range(rows)]
    for row in range(0, rows, beam):  # the first beam of a prompt has read it
        for j, key in enumerate(pasts[row]):
            pool[table[row, 1 + j // size], j % size] = key
    state = ct.State(table, device=device)
    parents = np.repeat(np.arange(0, rows, beam), beam)
    for step in range(steps):
        given = (state.value, ct.asarray(parents.astype(np.int32), device=device))
        _, noted = apply_all(get("beam_blocks"), given, {"beam": beam, "size": size})
        table, copies = state.numpy(), noted.numpy()
        moved = [(source, target) for source, target, keys in copies.tolist() if keys]
        assert not {a for a, _ in moved} & {b for _, b in moved}
        for source, target, keys in copies.tolist():
            pool[target, :keys] = pool[source, :keys]
        pasts = [[*pasts[parent], 100 * step + row] for row, parent in enumerate(parents)]
        written = set()
        for row, past in enumerate(pasts):
            position = int(table[row, 0])
            assert position == len(past) - 1
            block = int(table[row, 1 + position // size])
            pool[block, position % size] = past[-1]
            written.add(block)
        assert len(written) == rows  # no beam writes in another's block
        for row, past in enumerate(pasts):
            blocks = [table[row, 1 + j // size] for j in range(len(past))]
            assert [pool[b, j % size] for j, b in enumerate(blocks)] == past
        starts = np.arange(0, rows, beam)[:, None]
        parents = (starts + rng.integers(0, beam, (prompts, beam))).reshape(-1)
        if step % 3 == 2:
            parents = (starts + rng.permuted(np.arange(beam))).reshape(-1)


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize(("windows", "beam"), [(1, 1), (2, 3), (1, 5), (2, 16)])
def test_each_beam_sees_the_slots_of_its_past(device: ct.Device, windows: int, beam: int) -> None:
    """Many steps: what a beam sees are a prompt, and the slots that were written along its past."""
    rng, steps, first = np.random.default_rng(beam), 9, 3
    vocab, end, zero = 40, 7, 20
    rows, each = windows * beam, np.arange(windows * beam)
    seen = np.zeros((rows, first + steps * beam), bool)
    seen[:, :first] = True
    seen[each, first + each % beam] = True
    notes = np.zeros((rows, len(NOTES)), np.int32)
    notes[:, LAST], notes[:, SEED] = zero - 1, each
    notes[:, ENDED] = each // beam
    at = np.full((windows, 2), first, np.int32)
    went = [np.full(rows, -1, np.int32)] * 2, [np.zeros(rows, np.float32)]
    states = [ct.State(x, device=device) for x in (seen, notes, at, *went[0], *went[1])]
    pasts = [[*range(first), first + row % beam] for row in range(rows)]
    texts: list[list[int]] = [[] for _ in range(rows)]
    seeds = each
    for step in range(steps):
        begun, shape = first + step * beam, (windows, 2 * beam)
        best = -np.sort(rng.random(shape), 1).astype(np.float32)
        of_beam, next_tokens = rng.integers(0, beam, shape), rng.integers(0, vocab, shape)
        next_tokens[:, :beam][rng.random((windows, beam)) < 0.3] = end
        next_tokens[:, beam:] = np.maximum(next_tokens[:, beam:], end + 1)  # enough that go on
        codes = (of_beam * vocab + next_tokens).astype(np.int32)
        given = (ct.asarray(x, device=device) for x in (best, codes))
        attrs = {"beam": beam, "vocab": vocab, "end": end, "zero": zero}
        apply_all(get("speech_move"), (*(s.value for s in states), *given), attrs)
        on = [[i for i in range(2 * beam) if row[i] != end][:beam] for row in next_tokens]
        starts = np.arange(windows)[:, None] * beam
        parents = (starts + np.take_along_axis(of_beam, np.array(on), 1)).ravel()
        tokens = np.take_along_axis(next_tokens, np.array(on), 1).ravel()
        pasts = [[*pasts[p], begun + beam + row % beam] for row, p in enumerate(parents)]
        texts = [[*texts[p], int(t)] for p, t in zip(parents, tokens, strict=True)]
        seeds = seeds[parents]
        seen, notes, at, *chosen = (state.numpy() for state in states)
        wanted = (tokens, parents, np.take_along_axis(best, np.array(on), 1).ravel())
        for got, right in zip(chosen, wanted, strict=True):
            np.testing.assert_array_equal(got, right)
        within = [[slot for slot in past if slot < seen.shape[1]] for past in pasts]
        assert [np.flatnonzero(row).tolist() for row in seen] == within
        assert at.tolist() == [[first + step + 1, begun + beam]] * windows
        for row, text in enumerate(texts):
            times = [t for t in text if t >= zero]
            before = text[-2] >= zero if len(text) > 1 else True
            assert notes[row, [STEPS, LAST, WAS, BEFORE]].tolist() == [
                step + 1, times[-1] if times else zero - 1, text[-1] >= zero, before
            ]  # fmt: skip
        assert notes[:, ENDED].tolist() == (each // beam).tolist()
        assert notes[:, SEED].tolist() == seeds.tolist()


@pytest.mark.devices(*EVERY)
def test_what_is_no_block_of_the_pool_is_left_alone(device: ct.Device) -> None:
    pools = [np.random.default_rng(n).standard_normal((2, 3, 4, 8)).astype(np.float32)
             for n in range(2)]  # fmt: skip
    states = [ct.State(pool, device=device) for pool in pools]
    copies = np.array([[1, 0, 4], [1, 3, 4], [5, 2, 4], [-1, 2, 4], [1, -2, 4], [1, 2, 0]])
    given = ct.asarray(copies.astype(np.int32), device=device)
    apply_all(get("cache_copy"), (*(s.value for s in states), given), {})
    for state, pool in zip(states, pools, strict=True):
        np.testing.assert_array_equal(state.numpy(), pool)
