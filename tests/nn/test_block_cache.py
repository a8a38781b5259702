"""Keys and values in blocks: the host's tables, and what the device writes and reads by them."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.errors import DTypeError, KVCacheFullError, ShapeError
from centella.nn.block_cache import BlockCache, BlockView
from centella.nn.block_table import Blocks, BlockTable
from tests.support.devices import own
from tests.support.windowed import windowed

Array = np.ndarray[Any, Any]
EVERY = ("cpu", "simulator", "webgpu", "webgpu-minimum", "webgpu-hardware", "cuda")


class Memory:
    """Tokens in place of keys, written and copied as a device does."""

    def __init__(self, count: int, size: int) -> None:
        self.blocks = Blocks(count, size)
        self.content = [[-1] * size for _ in range(count)]

    def write(self, table: BlockTable, tokens: list[int]) -> None:
        start, size = len(table.tokens), self.blocks.size
        for source, target in table.reserve(start, start + len(tokens)):
            self.content[target] = list(self.content[source])
        for i, token in enumerate(tokens, start):
            self.content[table.blocks[i // size]][i % size] = token
        table.add(tokens)

    def read(self, table: BlockTable) -> list[int]:
        size = self.blocks.size
        return [self.content[table.blocks[i // size]][i % size] for i in range(len(table.tokens))]


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_changes_keeps_every_sequence(seed: int) -> None:
    rng = random.Random(seed)
    memory = Memory(rng.choice([8, 20, 60]), rng.choice([1, 3, 4]))
    tables, wanted, full = list[BlockTable](), list[list[int]](), 0
    for _ in range(600):
        kind = rng.choice(["new", "grow", "grow", "grow", "fork", "cut", "drop"])
        if kind == "new" or not tables:
            table, ids = BlockTable(memory.blocks), [rng.randint(0, 1) for _ in range(9)]
            shared = table.reuse(ids)
            assert shared % memory.blocks.size == 0
            tables.append(table)
            wanted.append(ids[:shared])
            continue
        i = rng.randrange(len(tables))
        table = tables[i]
        if kind == "grow":
            tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 7))]
            before = (list(table.blocks), memory.blocks.free)
            try:
                memory.write(table, tokens)
            except KVCacheFullError:
                assert (table.blocks, memory.blocks.free) == before
                full += 1
            else:
                wanted[i] += tokens
        elif kind == "fork":
            tables.append(table.fork())
            wanted.append(list(wanted[i]))
        elif kind == "cut":
            length = rng.randint(0, len(table.tokens))
            table.truncate(length)
            del wanted[i][length:]
        else:
            table.release()
            del tables[i], wanted[i]
        assert [memory.read(t) for t in tables] == wanted == [t.tokens for t in tables]
        used = {block for t in tables for block in t.blocks}
        assert len(used) + memory.blocks.free == memory.blocks.count - 1
        assert 0 not in used
    for table in tables:
        table.release()
    assert memory.blocks.free == memory.blocks.count - 1
    assert full or memory.blocks.count == 60


def test_what_was_released_is_found_again_until_its_memory_is_needed() -> None:
    memory = Memory(6, 4)
    first, ids = BlockTable(memory.blocks), list(range(10))
    memory.write(first, ids)
    blocks = list(first.blocks)
    first.release()
    assert memory.blocks.free == 5
    again = BlockTable(memory.blocks)
    assert again.reuse([*ids[:8], 99, 99, 99]) == 8
    assert again.blocks == blocks[:2]
    other = BlockTable(memory.blocks)
    memory.write(other, [7] * 12)  # all the rest
    with pytest.raises(KVCacheFullError, match="expected 1 free blocks of 4 keys, got 0 of 5"):
        memory.write(other, [7])
    again.release()
    memory.write(other, [7] * 4)
    last = BlockTable(memory.blocks)
    assert last.reuse(ids) == 4  # the end of it went first
    last.release()
    memory.blocks.forget_all()
    assert last.reuse(ids) == 0


def test_mistakes_of_tables() -> None:
    table = BlockTable(Blocks(4, 4))
    with pytest.raises(ShapeError, match="expected up to 0 tokens more, got 1; reserve"):
        table.add([1])
    with pytest.raises(ShapeError, match="truncate: expected 0 to 0 tokens, got 3"):
        table.truncate(3)
    with pytest.raises(ShapeError, match="Blocks: expected count of 2 or more"):
        Blocks(1)


def appended(
    device: ct.Device, cache: BlockCache, rows: Array, qkv: Array, tables: tuple[Array, Array],
    norms: Array | None, layer: int,
) -> tuple[Array, Array]:  # fmt: skip
    """q of a step, and what it attends to."""
    view = cache.view(ct.asarray(rows, device=device))
    cos, sin = (ct.asarray(t, device=device) for t in tables)
    weights = None if norms is None else ct.asarray(norms, device=device)
    x = ct.asarray(qkv, device=device)
    x = x.astype(cache.dtype) if cache.dtype.is_float else x
    q = view.append_qkv(x, cos, sin, layer, qk_norm=weights)
    y = view.attend(q, layer)
    return q.numpy(), y.numpy()


def check_steps(device: ct.Device, dim: int, norm: bool, dtype: str = "f32") -> None:
    """Prompts in unequal blocks, padded; then a token of each, and a row of nobody's."""
    rng, heads, kv = np.random.default_rng(dim), 2, 2
    cache = BlockCache(kv, dim, 7, num_layers=2, dtype=dtype, device=device)
    near = 2e-5 if dtype == "f32" else 0.05  # of a number of i8 that rounds otherwise
    for state in (s for layer in cache._layers for s in layer.states):
        poison = np.full(state.shape, np.nan if state.dtype.is_float else 99, np.float32)
        poison[:, 0] = 0  # what padding reads
        state.assign(poison.astype(state.dtype.numpy))
    angles = rng.standard_normal((200, dim // 2))
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    norms = rng.standard_normal((2, dim)).astype(np.float32) if norm else None
    lengths, sequences = (70, 3), [cache.sequence(), cache.sequence()]
    alone = [ct.KVCache(1, kv, dim, 192, dtype=dtype, device="cpu") for _ in lengths]
    prompt, step = (
        rng.standard_normal((n, t, (heads + 2 * kv) * dim)).astype(np.float32)
        for n, t in ((2, 72), (3, 1))
    )
    for table, length in zip(sequences, lengths, strict=True):
        table.reserve(0, length)
    rows = cache.rows([(0, table) for table in sequences], 2, 3)
    assert rows[1].tolist() == [0, sequences[1].blocks[0], 0, 0]

    def expected(i: int, x: Array) -> tuple[Array, Array]:
        qkv, cos, sin = (ct.asarray(part, device="cpu") for part in (x[None], *tables))
        weights = None if norms is None else ct.asarray(norms, device="cpu")
        q = alone[i].append_qkv(qkv, cos, sin, qk_norm=weights)
        return q.numpy(), alone[i].attend(q).numpy()

    got = appended(device, cache, rows, prompt, tables, norms, 1)
    for i, length in enumerate(lengths):
        for value, wanted in zip(got, expected(i, prompt[i, :length]), strict=True):
            np.testing.assert_allclose(value[i : i + 1, :, :length], wanted, atol=near)
        sequences[i].add(list(range(length)))
        assert sequences[i].reserve(length, length + 1) == []
    rows = cache.rows([(n, table) for n, table in zip(lengths, sequences, strict=True)], 3, 2)
    got = appended(device, cache, rows, step, tables, norms, 1)
    for i in range(2):
        for value, wanted in zip(got, expected(i, step[i]), strict=True):
            np.testing.assert_allclose(value[i : i + 1], wanted, atol=near)
    keys = cache.states(1)[0].numpy()
    assert (np.isnan(keys[:, 4:]) if dtype == "f32" else keys[:, 4:] == 99).all()
    assert not keys[:, 0].any()


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize(("dim", "norm"), [(16, True), (10, False)])
def test_steps_of_unequal_sequences_equal_a_cache_each(
    device: ct.Device, dim: int, norm: bool
) -> None:
    check_steps(device, dim, norm)


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize(("dim", "norm"), [(16, True), (10, False)])
def test_the_same_in_i8(device: ct.Device, dim: int, norm: bool) -> None:
    check_steps(device, dim, norm, "i8")


@pytest.mark.parametrize("norm", [True, False])
def test_a_pool_above_a_binding(norm: bool) -> None:
    check_steps(windowed("webgpu", binding=36_000), 10, norm)


@pytest.mark.devices("cpu", "simulator", "webgpu", "cuda")
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8"])
def test_a_fork_writes_a_copy(device: ct.Device, dtype: str) -> None:
    cache = BlockCache(1, 8, 3, device=device, dtype=dtype)
    first = cache.sequence()
    first.reserve(0, 5)
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((1, 5, 24)).astype(np.float32)
    still = np.ones((9, 4), np.float32), np.zeros((9, 4), np.float32)
    appended(device, cache, cache.rows([(0, first)], 1, 1), qkv, still, None, 0)
    first.add([1, 2, 3, 4, 5])
    fork = first.fork()
    fork.truncate(4)
    pairs = fork.reserve(4, 5)
    assert pairs == [(first.blocks[0], fork.blocks[0])]
    cache.copy(pairs)
    appended(device, cache, cache.rows([(4, fork)], 1, 1), qkv[:, :1], still, None, 0)
    pools = cache.layer(0).rows(lambda pool: pool)
    keys, values = (pool.numpy().astype(np.float32) for pool in pools)
    for pool, at in ((keys, 8), (values, 16)):
        wanted = qkv[0, [0, 1, 2, 3, 0], at : at + 8]
        got, kept, off = pool[0, fork.blocks[0], :5], pool[0, first.blocks[0], 4], 0.01
        np.testing.assert_allclose(got, wanted, rtol=off, atol=off if dtype == "i8" else 0.0)
        np.testing.assert_allclose(kept, qkv[0, 4, at : at + 8], rtol=off, atol=off)


@pytest.mark.devices("cpu", "simulator", "webgpu", "cuda")
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8"])
def test_blocks_are_copied_together_and_as_they_are(device: ct.Device, dtype: str) -> None:
    cache = BlockCache(2, 10, 7, device=device, dtype=dtype)
    table, rng = cache.sequence(), np.random.default_rng(1)
    table.reserve(0, 3 * 64)
    qkv = rng.standard_normal((1, 192, 60)).astype(np.float32)
    still = np.ones((192, 5), np.float32), np.zeros((192, 5), np.float32)
    appended(device, cache, cache.rows([(0, table)], 1, 3), qkv, still, None, 0)
    others = [b for b in range(1, 8) if b not in table.blocks][:3]
    cache.copy([(table.blocks[0], others[0])])
    cache.copy([])
    device.synchronize()
    with ct.ledger() as led:
        cache.copy(list(zip(table.blocks, others, strict=True)))
        device.synchronize()
    assert led.submissions == 1
    for state in cache.layer(0).stored:
        pool = state.numpy()
        np.testing.assert_array_equal(pool[:, others], pool[:, table.blocks])
        assert np.any(pool[:, others]) and not np.any(pool[:, 0])


def test_mistakes_of_the_cache() -> None:
    with pytest.raises(ShapeError, match="BlockCache: expected blocks of 1 or more"):
        BlockCache(1, 8, 0, device="cpu")
    with pytest.raises(DTypeError, match="BlockCache: expected a float dtype or i8, got i32"):
        BlockCache(1, 8, 2, dtype="i32", device="cpu")
    cache = BlockCache(1, 8, 2, device="cpu")
    with pytest.raises(ShapeError, match=r"expected an i32 table \[batch, 1 \+ width\], got f32"):
        BlockView(cache, ct.ones((1, 3), device="cpu"))
    assert "2 blocks free on cpu" in repr(cache)


@pytest.mark.devices("cpu", "webgpu", "cuda")
def test_a_pool_without_room_is_refused_before_memory_is_taken(device: ct.Device) -> None:
    small = own(device, memory_limit=1 << 20)
    with ct.ledger() as led, pytest.raises(ct.OutOfMemoryError) as caught:
        BlockCache(4, 64, 99, num_layers=3, device=small)
    text = str(caught.value)
    assert re.match(r"BlockCache: expected room for \d\d,\d{3},\d{3} bytes of keys and", text)
    assert "got 1,048,576 free; ask for fewer tokens (6,336) for all sequences together" in text
    assert led.counts.allocations == 0
