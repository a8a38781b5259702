"""Mixtures of experts: the layer against NumPy in float64, configs, and what is never made.

The checkpoint of Qwen3-MoE is among those of `test_llama.py`.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.models.llama import MLP, LlamaModel
from centella.models.llama_config import LlamaConfig
from centella.models.moe import SparseMLP
from centella.nn import RMSNorm
from tests.support.model_common import DATA

FOLDER = DATA / "decoders" / "qwen3-moe"
EVERY = ("cpu", "webgpu", "webgpu-hardware", "cuda")
Array = np.ndarray[Any, Any]


def config_of(**changes: Any) -> LlamaConfig:
    values = json.loads((FOLDER / "config.json").read_text())
    return LlamaConfig.from_dict({**values, **changes})


def layer_of(config: LlamaConfig, device: ct.Device) -> tuple[SparseMLP, dict[str, Array]]:
    """A layer of random weights, and those."""
    random, h, inner = np.random.default_rng(3), config.hidden_size, config.moe_intermediate_size
    shapes = {"gate.weight": (config.num_experts, h)}
    for e in range(config.num_experts):
        for name, shape in (("gate", (inner, h)), ("up", (inner, h)), ("down", (h, inner))):
            shapes[f"experts.{e}.{name}_proj.weight"] = shape
    weights = {n: random.standard_normal(s).astype(np.float32) * 0.3 for n, s in shapes.items()}
    layer = SparseMLP(config)
    layer.load_parameters(weights, device=device)
    return layer, weights


def expected(x: Array, w: dict[str, Array], config: LlamaConfig, scale: float) -> Array:
    """One token after the other, one expert after the other."""
    y = np.zeros_like(x)
    for t, h in enumerate(x):
        logits = w["gate.weight"] @ h
        p = np.exp(logits - logits.max())
        p /= p.sum()
        chosen = np.argsort(-p, kind="stable")[: config.num_experts_per_tok]
        total = p[chosen].sum() if config.norm_topk_prob else 1.0
        for e in chosen:
            gate, up, down = (w[f"experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down"))
            g = gate @ h
            y[t] += p[e] / total * scale * (down @ (g / (1 + np.exp(-g)) * (up @ h)))
    return y


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 37), (3, 5)])
def test_the_layer(device: ct.Device, shape: tuple[int, int], normalised: bool) -> None:
    config = config_of(norm_topk_prob=normalised, residual_multiplier=0.5)
    layer, weights = layer_of(config, device)
    x = np.random.default_rng(5).standard_normal((*shape, 48)).astype(np.float32)
    on_device = ct.asarray(x, device=device)
    rows = x.reshape(-1, 48).astype(np.float64)
    wanted = expected(rows, weights, config, 0.5).reshape(x.shape) + x
    got = layer(on_device, None, on_device).numpy()
    np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max(), rtol=0)


@pytest.mark.devices(*EVERY)
def test_a_layer_is_few_launches_and_no_weight_is_written(device: ct.Device) -> None:
    """However many experts and tokens there are, memory grows with tokens times picks."""
    config = config_of(num_local_experts=60, num_experts_per_tok=2)
    layer, _ = layer_of(config, device)
    norm = RMSNorm(48)
    norm.load_parameters({"weight": np.ones(48, np.float32)}, device=device)
    x = ct.ones((1, 64, 48), device=device)
    layer(x, norm, x).numpy()
    with ct.ledger() as led:
        before = device.memory.live
        layer(x, norm, x).numpy()
    assert led.submissions == 1 and led.launches <= 8
    assert led.peak_bytes - before < 64 * 1024 < layer.experts.up_proj.nbytes


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, (True, True, True)),
        ({"mlp_only_layers": [1]}, (True, False, True)),
        ({"decoder_sparse_step": 2}, (False, True, False)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (False, False, False)),
    ],
)
def test_dense_layers_between(changes: dict[str, Any], sparse: tuple[bool, ...]) -> None:
    config = config_of(**changes)
    assert config.sparse == sparse
    kinds = tuple(type(layer.mlp) for layer in LlamaModel(config).layers)
    assert kinds == tuple(SparseMLP if s else MLP for s in sparse)


def test_fields_by_either_name_and_windows() -> None:
    named = config_of(num_local_experts=None, num_experts=7)
    assert named.num_experts == config_of().num_experts == 7
    window = {"sliding_window": 9, "max_window_layers": 2, "layer_types": None}
    assert config_of(**window, use_sliding_window=True).windows == (9, 9, 9)
    assert config_of(**window, use_sliding_window=False).windows == (0, 0, 0)
