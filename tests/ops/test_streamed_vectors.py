"""What streamed products ask for ahead: the biases of a group's first block, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from centella import lang
from centella.dtypes import DType, bf16, f16, f32, u32
from centella.emit.program import Call
from centella.emit.ptx import emit_ptx
from centella.lang import In, InOut, storage
from centella.lang.values import Value
from centella.ops.matmul.epilogue import ask_for_vectors
from centella.ops.quant.digits import STREAMED_DIGITS
from tests.ops import test_streamed, test_streamed_blocks, test_streamed_digits, test_streamed_rows
from tests.support.lang_common import empty, on_simulator, record, tensor
from tests.support.launched import traced

Array = np.ndarray[Any, Any]
NOTHING = 0xFFFFFFFF
THREADS = 64


def asked_columns(
    n: int, count: int, gated: bool, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> Array:
    """[groups, halves, threads]: what each thread asks for."""
    halves, groups = 2 if gated else 1, -(-n // count)

    def kernel(bias: In[storage], y: InOut[u32]) -> None:
        me, half = lang.local_id(), itertools.count()

        def note(source: Any, column: Value) -> None:
            assert source is bias
            y[(lang.group_id() * halves + next(half)) * THREADS + me] = column

        monkeypatch.setattr(lang.ptx, "prefetch", note)
        ask_for_vectors({"bias": bias}, count, lang.const(n, u32), gated, me)
        assert next(half) == halves

    y = tensor(np.full(groups * halves * THREADS, NOTHING, np.uint32), u32)
    tensors = {"bias": empty((halves * n,), dtype), "y": y}
    on_simulator(record(kernel, tensors, THREADS), tensors, groups)
    return y.bits().reshape(groups, halves, THREADS)


@pytest.mark.parametrize(("n", "count"), [(2, 2), (41, 2), (7, 3), (100, 40), (128, 64), (130, 62)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [f32, f16], ids=str)
def test_a_group_asks_for_all_of_its_first_block(
    n: int, count: int, gated: bool, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a vector begins; no element is of another half, or behind the last."""
    near = 32 // dtype.itemsize  # of a sector of the L2 cache
    for group, lines in enumerate(asked_columns(n, count, gated, dtype, monkeypatch)):
        for half, line in enumerate(lines):
            first, last = half * n + group * count, half * n + min((group + 1) * count, n) - 1
            asked = line[line != NOTHING].astype(np.int64)
            assert asked.size == -(-count // near) + 1
            assert first <= asked.min() and asked.max() < (half + 1) * n
            block = np.arange(first, last + 1)
            for offset in range(near):
                assert {*(block + offset) // near} <= {*(asked + offset) // near}


def call_of(kernel: str, gate: str, extras: tuple[str, ...]) -> Call:
    """The launch of a product by one of the kernels."""
    if kernel == "streamed":
        name = "normed_linear" if gate else "linear"
        return test_streamed.call_of(name, 300, 256, bf16, gate, *extras)
    if kernel == "streamed_rows":
        return test_streamed_rows.call_of(5, 300, 256, *extras, gate=gate)
    if gate:
        return test_streamed_digits.normed_of("q4_k", 300, 256, *extras, gate=gate)[0][0]
    (call,), _ = test_streamed_blocks.product_of(
        "q4_k", 1, 300, 256, *extras, variant=STREAMED_DIGITS
    )
    return call


@pytest.mark.parametrize(
    ("gate", "extras"),
    [
        ("", ()),
        ("silu", ()),
        ("", ("residual",)),
        ("", ("bias",)),
        ("", ("bias", "residual")),
        ("silu", ("bias",)),
    ],
)
@pytest.mark.parametrize("kernel", ["streamed", "streamed_rows", "streamed_digits"])
def test_biases_are_asked_for_before_the_wait(
    kernel: str, gate: str, extras: tuple[str, ...]
) -> None:
    """They are not read there: a launch that writes them may still run."""
    call = call_of(kernel, gate, extras)
    assert call.kernel.name == kernel
    ir = traced(call)
    asked = [i for i, (op, *_) in enumerate(ir.body) if op == "prefetch"]
    vectors = [e for e in extras if e == "bias"]
    assert [ir.args[ir.body[i][3]].name for i in asked] == vectors * (2 if gate else 1)
    assert ir.unawaited.issuperset(asked)
    assert "bias" not in [ir.args[i].name for i in ir.early]
    assert emit_ptx(ir, "sm_90a").count("prefetch") == len(asked)


@pytest.mark.parametrize("n", [300, 24])
def test_a_residual_is_loaded_once_before_the_sums(n: int) -> None:
    ir = traced(test_streamed.call_of("linear", n, 256, bf16, "", "bias", "residual"))
    loads = [i for i, (op, _, _, attr) in enumerate(ir.body)
             if op == "load" and ir.args[attr].name == "residual"]  # fmt: skip
    assert len(loads) == bf16.per_word
    assert max(loads) < [op for op, *_ in ir.body].index("mma")
