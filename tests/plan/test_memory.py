"""Peak memory of a plan, against what has to be alive at once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.models.bert import BertConfig, BertModel
from centella.nn import module
from centella.plan.build import Memo, build
from centella.plan.placement import Lifetime, largest_live, place
from centella.plan.plan import Plan
from centella.record.recording import Recorded
from centella.runtime import prepare
from centella.tensors import functional as f

LAYERS, HIDDEN, BATCH, SEQ = 12, 64, 4, 48


def encoder(device: ct.Device, dtype: str = "f32") -> BertModel:
    """A BERT of usual proportions with weights that mean nothing."""
    config = BertConfig(
        vocab_size=100, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4,
        intermediate_size=4 * HIDDEN, max_position_embeddings=64,
    )  # fmt: skip
    model = BertModel(config, ct.dtypes.dtype_of(dtype))
    tensors = {}
    for path, shape in shapes_of(model):
        tensors[path] = np.zeros(shape, np.float32)
    model.load_parameters(tensors, device=device, dtype=dtype)
    return model


def shapes_of(model: BertModel) -> list[tuple[str, Any]]:
    """Every parameter of this model by its path, and its shape."""
    return [(path, value.shape) for path, _, _, value in module._walk(model)]


def planned(device: ct.Device, *outputs: ct.Tensor) -> Plan:
    """The plan of what is recorded; nothing is run."""
    recording = device.recorder.implicit()
    taken = Recorded(recording.nodes, recording.uploads)
    ends = prepare.boundary_of(taken, [t._value for t in outputs])
    return build(taken.nodes, ends.slots, ends.wanted, device.caps, Memo())


def check(plan: Plan) -> None:
    """No two values that are alive at once share a buffer, and every value has one."""
    slots, sizes, _ = place(plan.values)
    assert sizes == plan.buffers
    of: dict[int, list[Lifetime]] = {}
    for value, slot in zip(plan.values, slots, strict=True):
        assert value.nbytes <= sizes[slot]
        of.setdefault(slot, []).append(value)
    for sharing in of.values():
        for a, b in itertools.pairwise(sorted(sharing, key=lambda v: v.node)):
            assert a.last < b.node
            assert not a.kept
    for step in plan.launches:
        outs = step.slots[step.inputs :] if plan.nodes[step.node].op.mutates == () else ()
        if all(s >= plan.externals for s in outs):
            assert not set(outs) & set(step.slots[: step.inputs])


@pytest.mark.devices("cpu", "simulator")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_an_encoder_needs_little_more_than_what_is_alive(device: ct.Device, dtype: str) -> None:
    model = encoder(device, dtype)
    ids = ct.asarray(np.zeros((BATCH, SEQ), np.int32), device=device)
    lengths = ct.asarray(np.full(BATCH, SEQ, np.int32), device=device)
    states = model(ids, lengths)
    plan = planned(device, states)
    text = plan.explain()
    device.recorder.implicit().fail()
    check(plan)
    live, alive = largest_live(plan.values)
    assert sum(plan.buffers) <= 1.2 * live
    item = 4 if dtype == "f32" else 2
    state = BATCH * SEQ * HIDDEN * item
    assert live == 6 * state  # a state, what the wide half makes of it, and the next state
    assert sorted(v.nbytes for v in alive) == [state, state, 4 * state]
    assert f"largest live set {live:,} bytes: linear {4 * state:,}, " in text
    assert len(plan.buffers) <= 4


@pytest.mark.devices("cpu", "simulator")
def test_a_small_value_lies_where_a_large_one_was(device: ct.Device) -> None:
    x = ct.asarray(np.zeros((4, 8), np.float32), device=device)
    w = ct.asarray(np.zeros((512, 8), np.float32), device=device)
    wide = f.softmax(f.linear(x, w))
    narrow = f.softmax(f.matmul(wide, w))
    plan = planned(device, f.linear(f.softmax(narrow), w))
    device.recorder.implicit().fail()
    check(plan)
    assert len(plan.buffers) <= 3


def test_random_lifetimes_are_placed_near_what_is_alive() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        nodes = int(rng.integers(1, 60))
        values = [
            Lifetime(i, 0, int(rng.integers(1, 40)) * 1024, int(i + rng.integers(0, 6)), False)
            for i in range(nodes)
        ]
        slots, sizes, makers = place(values)
        assert place(values) == (slots, sizes, makers)
        live, alive = largest_live(values)
        assert sum(v.nbytes for v in alive) == live
        assert live <= sum(sizes) <= 1.6 * live
        for (a, x), (b, y) in itertools.combinations(zip(values, slots, strict=True), 2):
            assert x != y or a.last < b.node or b.last < a.node


def test_a_result_takes_over_a_buffer_of_its_size_alone() -> None:
    values = [
        Lifetime(0, 0, 4096, 1, False), Lifetime(1, 0, 1024, 2, False),
        Lifetime(2, 0, 4096, 2, True), Lifetime(2, 1, 512, 2, True),
    ]  # fmt: skip
    slots, sizes, makers = place(values)
    assert slots == [0, 1, 0, 2]
    assert sizes == (4096, 1024, 512)
    assert makers == (0, 1, 2)
