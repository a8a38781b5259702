"""`rope_cache_write` outside a device: what it reads of the norm's weights."""

from __future__ import annotations

import numpy as np
import pytest

from centella.dtypes import DType, bf16, f16, f32, i32
from centella.op import op
from centella.simulator.run import simulate
from centella.specs import make_spec
from tests.support.attention import CAPS
from tests.support.lang_common import Tensor
from tests.support.launched import laid_out, op_form, parameters, rounded, traced


@pytest.mark.parametrize(("dim", "rotary"), [(12, 12), (20, 16), (21, 16), (24, 24)])
@pytest.mark.parametrize("norm", [f32, f16], ids=str)
@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_weights_of_the_norm_end_with_the_head(
    dim: int, rotary: int, norm: DType, dtype: DType
) -> None:
    """Rows of x are padded to whole chunks; those of the weights may end before."""
    cache, x = make_spec((1, 1, 4, dim), dtype, 16), make_spec((1, 4, 3, dim), dtype, 16)
    table = make_spec((8, rotary // 2), f32, 16)
    inputs = (
        cache,
        cache,
        x,
        table,
        table,
        make_spec((1,), i32, 16),
        make_spec((2, dim), norm, 16),
    )
    outputs = (cache, cache, make_spec((1, 2, 3, dim), dtype, 16))
    attrs = {"interleaved": True, "eps": 1e-5}
    (call,) = op_form(op.get("rope_cache_write"), inputs, outputs, attrs).lower(CAPS).calls
    ir, rng = traced(call), np.random.default_rng(dim)
    values = rng.standard_normal(x.shape)
    given = [np.zeros(cache.shape), np.zeros(cache.shape), values, np.ones(table.shape),
             np.zeros(table.shape), np.zeros(1), np.full((2, dim), 2.0)]  # fmt: skip
    specs, arrays = (*inputs, *outputs), dict(enumerate(given))
    words = [laid_out(arrays.get(r.index), specs[r.index]) for r in call.tensors]
    simulate(ir, words, parameters(call, ir), call.groups)
    (q,) = (n for n, r in enumerate(call.tensors) if r.index == len(specs) - 1)
    got = Tensor(words[q], dtype, specs[-1].shape, specs[-1].strides).numpy()
    heads = rounded(values, dtype)[:, :2]
    wanted = 2 * heads / np.sqrt(np.mean(heads * heads, axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(got, wanted, rtol=2 * dtype.epsilon)
