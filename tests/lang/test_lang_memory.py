"""Memory of the device `simulator`: what was written, from launch to launch."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import lang
from centella.backends.simulator import logical_words, pad_words
from centella.dtypes import dtype_of
from centella.specs import Spec, make_spec

UNWRITTEN = r"kernel '{}': '{}' word {}: read, but nobody wrote it \(thread {} of group 0"


@pytest.fixture
def where() -> ct.Device:
    """A simulator that reuses nothing."""
    return ct.device("simulator", pool="exact")


@ct.kernel(workgroup=32)
def begin(z: ct.InOut[ct.f32]) -> None:
    """Writes the first half."""
    with lang.if_(lang.global_id() < 16):
        z[lang.global_id()] = 1.0


@ct.kernel(workgroup=32)
def take(x: ct.In[ct.f32], y: ct.Out[ct.f32], n: ct.u32) -> None:
    """Reads the first n."""
    i = lang.global_id()
    y[i] = x[lang.minimum(i, n - 1)]


@ct.kernel(workgroup=32)
def increase(z: ct.InOut[ct.f32]) -> None:
    z[lang.global_id()] += 1.0


@ct.kernel(workgroup=8)
def chunks(x: ct.In[ct.f32, 2], y: ct.Out[ct.f32]) -> None:
    """The first of each row, loaded with what is beside it."""
    i = lang.global_id()
    with lang.if_(i < x.shape(0)):
        y[i] = x.load(i, x.shape(1) - 1)[0]


def test_a_word_that_nobody_wrote_is_not_read(where: ct.Device) -> None:
    empty, y = ct.empty(32, device=where), ct.empty(32, device=where)
    take(empty, y, 8, threads=32)
    with pytest.raises(ct.SimulationError, match=UNWRITTEN.format("take", "x", 0, 0)):
        y.numpy()
    state = ct.State.empty(32, device=where)
    increase(state, threads=32)
    with pytest.raises(ct.SimulationError, match=UNWRITTEN.format("increase", "z", 0, 0)):
        state.numpy()
    state = ct.State.empty(32, device=where)
    begin(state, threads=32)
    y = ct.empty(32, device=where)
    take(state, y, 16, threads=32)
    assert y.numpy().all()
    late = ct.empty(32, device=where)
    take(state, late, 17, threads=32)
    with pytest.raises(ct.SimulationError, match=UNWRITTEN.format("take", "x", 16, 16)):
        late.numpy()
    state.assign(2)
    increase(state, threads=32)
    assert np.array_equal(state.numpy(), np.full(32, 3))


def test_a_replay_input_is_written_as_far_as_its_source(where: ct.Device) -> None:
    state = ct.State.empty(32, device=where)

    def step(x: ct.Tensor) -> ct.Tensor:
        y = ct.empty(32, device=where)
        take(x, y, 32, threads=32)
        return y

    step_ = where.compile(step, np.zeros(32, np.float32))
    begin(state, threads=32)
    with pytest.raises(ct.SimulationError, match=UNWRITTEN.format("take", "x", 16, 16)):
        step_(state.value)
    state.assign(2)
    assert np.array_equal(step_(state.value).numpy(), np.full(32, 2))


def test_a_copy_of_a_state_copies_what_nobody_wrote(where: ct.Device) -> None:
    state = ct.State.empty(32, device=where)
    begin(state, threads=32)
    copied, y = copy.deepcopy(state), ct.empty(32, device=where)
    take(copied, y, 16, threads=32)
    assert y.numpy().all()


def test_memory_that_was_imported_may_be_read(where: ct.Device) -> None:
    x = ct.Tensor.from_buffer(np.arange(32, dtype=np.float32), 32, "f32", device=where)
    y = ct.empty(32, device=where)
    take(x, y, 32, threads=32)
    assert np.array_equal(y.numpy(), np.arange(32))


def test_pads_of_results_are_read_and_nothing_else_beside_them(where: ct.Device) -> None:
    """Rows of five are stored in eight words, of which the last three are nobody's."""
    x = ct.asarray(np.ones((3, 5), np.float32), device=where)
    wide = x @ ct.asarray(np.ones((5, 5), np.float32), device=where)  # stores five of eight
    y = ct.empty(3, device=where)
    chunks(wide, y, threads=3)
    assert np.array_equal(y.numpy(), np.full(3, 5))
    beside = ct.State.empty((3, 5), device=where)
    with pytest.raises(ct.SimulationError, match=UNWRITTEN.format("chunks", "x", 4, 0)):
        chunks(beside, y, threads=3)
        y.numpy()


@pytest.mark.parametrize("shape", [(), (3,), (8,), (1, 1), (5, 3), (2, 3, 5), (4, 3, 1), (0, 3)])
@pytest.mark.parametrize("dtype", ["f32", "f16", "i8"])
@pytest.mark.parametrize("turned", [False, True])
def test_each_word_belongs_to_an_element_or_a_pad(shape: Any, dtype: str, turned: bool) -> None:
    spec = make_spec(shape, dtype_of(dtype), 16)
    if turned:
        spec = Spec(shape[::-1], spec.dtype, spec.strides[::-1], False)
    words = spec.storage_bytes // 4
    elements, pads = logical_words(spec, 0, words), pad_words(spec, 0, words)
    assert not (elements & pads).any()
    assert (elements | pads).all() or not math.prod(shape)
    assert not pad_words(spec, 1, words).any()  # beside a part of a buffer lies another


@ct.kernel(workgroup=8)
def apart(x: ct.In[lang.storage], y: ct.Out[ct.f32]) -> None:
    """Words, taken apart."""
    i = lang.local_id()
    per = x.dtype.per_word
    for lane, value in enumerate(x.load_word(i * per)):
        y[i * per + lane] = value


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_words_are_unpacked_into_values(device: ct.Device, dtype: str) -> None:
    count = 8 * dtype_of(dtype).per_word
    x = ct.asarray(np.arange(count, dtype=np.float32), dtype, device)
    y = ct.empty(count, device=device)
    apart(x, y, threads=8)
    np.testing.assert_array_equal(y.numpy(), np.arange(count))


@ct.kernel(workgroup=8)
def values_of_bits(x: ct.In[lang.storage], y: ct.Out[lang.storage]) -> None:
    """A chunk a thread, as its values."""
    i = lang.local_id() * x.dtype.per_chunk
    y.store(i, x.unpack(x.load_bits(i)))


@pytest.mark.parametrize("dtype", ["f32", "i32", "u32", "f16", "bf16", "i8", "u8"])
def test_values_of_bits_are_those_of_the_dtype(device: ct.Device, dtype: str) -> None:
    kind = dtype_of(dtype)
    x = ct.arange(8 * kind.per_chunk, device=device).astype(kind)
    y = ct.empty(8 * kind.per_chunk, kind, device)
    values_of_bits(x, y, threads=8)
    np.testing.assert_array_equal(y.numpy(), x.numpy())


@ct.kernel(workgroup=8)
def bits(x: ct.In[lang.storage], y: ct.Out[ct.u32]) -> None:
    """A chunk a thread, as it is stored."""
    i = lang.local_id()
    for n, word in enumerate(x.load_bits(i * x.dtype.per_chunk)):
        y[i * 4 + n] = word


@pytest.mark.parametrize("dtype", ["f32", "u32", "f16", "bf16", "i8"])
def test_a_chunk_is_four_words(device: ct.Device, dtype: str) -> None:
    stored = np.arange(32, dtype=np.uint32) * 0x01020304
    kind = dtype_of(dtype)
    x = ct.asarray(stored.view(kind.numpy), kind, device)
    y = ct.empty(32, "u32", device)
    bits(x, y, threads=8)
    np.testing.assert_array_equal(y.numpy(), stored)
