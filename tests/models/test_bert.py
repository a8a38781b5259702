"""BERT against activations that transformers computed in float64, layer by layer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.errors import DTypeError, ShapeError, WeightsError
from centella.models.bert import BertConfig, BertModel
from centella.tasks.load import load
from tests.support.model_common import DATA, TINY, activations_of, copy_of, lengths_of, operations

CONFIG: dict[str, Any] = json.loads((DATA / "tiny-bert" / "config.json").read_text())
TOLERANCE = 1e-5  # of states of size 1 to 5, after a few layers in f32
Array = np.ndarray[Any, Any]


def model_of(folder: Path, device: ct.Device | str, dtype: str = "auto") -> BertModel:
    pytest.importorskip("tokenizers")
    return load(folder, device=device, dtype=dtype, task="embed").model


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("batch", [0, 1])
def test_layer_by_layer(device: ct.Device, name: str, batch: int) -> None:
    model, stored = model_of(DATA / name, device), activations_of(name, batch)
    ids = ct.asarray(stored["input_ids"], device=device)
    lengths = ct.asarray(lengths_of(stored), device=device)
    real = stored["attention_mask"] == 1
    x = model.embeddings(ids)
    np.testing.assert_allclose(x.numpy()[real], stored["embeddings"][real], atol=TOLERANCE)
    for i, layer in enumerate(model.encoder.layer):
        x = layer(x, lengths)
        expected = stored[f"layer{i}"][real]
        np.testing.assert_allclose(x.numpy()[real], expected, atol=TOLERANCE, err_msg=f"layer {i}")


@pytest.mark.parametrize("name", TINY)
def test_whole_model_is_one_submission_without_copies(device: ct.Device, name: str) -> None:
    model, stored = model_of(DATA / name, device), activations_of(name, 0)
    layers = model.config.num_hidden_layers
    with ct.ledger() as led:
        ids = ct.asarray(stored["input_ids"], device=device)
        states = model(ids, ct.asarray(lengths_of(stored), device=device)).numpy()
    led.expect(uploads=1, submissions=1, downloads=1)
    ops = operations(device)
    assert not {"copy", "reshape", "cast"} & set(ops)
    assert ops.count("linear") == 4 * layers
    assert ops.count("attention") == layers
    assert ops.count("norm") + ops.count("fused") == 2 * layers + 1  # the first with its sum
    real = stored["attention_mask"] == 1
    np.testing.assert_allclose(
        states[real], stored[f"layer{layers - 1}"][real], atol=TOLERANCE
    )  # fmt: skip


@pytest.mark.devices("simulator", "webgpu", "webgpu-minimum", "cuda")
@pytest.mark.parametrize("name", ["tiny-bert", "encoders/roberta"])
def test_embeddings_are_one_launch(device: ct.Device, name: str) -> None:
    """Of padded texts and of texts that lie end to end; tables are read where they are added."""
    embeddings = model_of(DATA / name, device).embeddings
    ids = np.array([[5, 7, 9, 6], [8, 5, 4, 7]], np.int32)
    at = np.tile(np.arange(4, dtype=np.int32), 2)[None]
    zeros = np.zeros((1, 8), np.int32)
    padded, flat, positions, types = (
        ct.asarray(a, device=device) for a in (ids, ids.reshape(1, -1), at, zeros)
    )
    ct.fetch(padded, flat, positions, types).result()
    results = []
    for given, launches in (
        ((padded,), 1),
        ((flat, None, positions), 1),
        ((flat, types, positions), 1 + (device.caps.max_storage_buffers == 8)),
    ):
        with ct.ledger() as led:
            results.append(embeddings(*given).numpy().reshape(8, -1))
        led.expect(launches=launches)
    for packed in results[1:]:
        np.testing.assert_array_equal(packed, results[0])


def test_padding_does_not_matter(device: ct.Device) -> None:
    model, stored = model_of(DATA / "tiny-bert", device), activations_of("tiny-bert", 1)
    lengths = ct.asarray(lengths_of(stored), device=device)
    wide = np.full((len(stored["input_ids"]), 32), 999, np.int32)
    wide[:, : stored["input_ids"].shape[1]] = stored["input_ids"]
    real = np.arange(32) < lengths_of(stored)[:, None]
    states = model(ct.asarray(wide, device=device), lengths).numpy()
    expected = stored["layer2"][stored["attention_mask"] == 1]
    np.testing.assert_allclose(states[real], expected, atol=TOLERANCE)


def test_weights_of_half_width_and_activations_of_full(device: ct.Device, tmp_path: Path) -> None:
    """An f16 checkpoint computes what its weights, widened, compute."""

    def edit(tensors: dict[str, Array]) -> dict[str, Array]:
        floats = {n: t for n, t in tensors.items() if t.dtype == np.float32}
        return {**tensors, **{n: t.astype(np.float16) for n, t in floats.items()}}

    folder = copy_of("tiny-bert", tmp_path, edit)
    model, stored = model_of(folder, device), activations_of("tiny-bert", 0)
    target = device.caps.target
    weight = model.encoder.layer[0].output.dense.weight
    assert weight.dtype.name == ("f32" if target == "numpy" else "f16")
    exact = model_of(folder, "cpu", "f32")

    def states(m: BertModel) -> Array:
        ids = ct.asarray(stored["input_ids"], device=m.device)
        out = m(ids, ct.asarray(lengths_of(stored), device=m.device))
        assert out.dtype.name == ("f16" if m is model and target == "ptx" else "f32")
        rows: Array = out.numpy().astype(np.float32)[stored["attention_mask"] == 1]
        return rows

    bound = 0.05 if target == "ptx" else TOLERANCE
    np.testing.assert_allclose(states(model), states(exact), atol=bound)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_narrow_activations(device: ct.Device, dtype: str) -> None:
    model, stored = model_of(DATA / "tiny-bert", device, dtype), activations_of("tiny-bert", 0)
    ids = ct.asarray(stored["input_ids"], device=device)
    states = model(ids, ct.asarray(lengths_of(stored), device=device))
    assert states.dtype.name == dtype
    got = states.numpy()
    assert not {"copy", "reshape", "cast"} & set(operations(device))
    real = stored["attention_mask"] == 1
    error = np.abs(got.astype(np.float32)[real] - stored["layer2"][real])
    assert error.max() < (0.03 if dtype == "f16" else 0.25)


def gelu_tanh(x: Array) -> Array:
    y: Array = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return y


def gelu(x: Array) -> Array:
    y: Array = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return y


def silu(x: Array) -> Array:
    y: Array = x / (1 + np.exp(-x))
    return y


# As `transformers.activations` has them.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_python": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_python_tanh": gelu_tanh,
    "gelu_accurate": gelu_tanh,
    "gelu_fast": lambda x: 0.5 * x * (1 + np.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": silu,
    "swish": silu,
    "tanh": np.tanh,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_have_a_name(name: str) -> None:
    model = BertModel(BertConfig.from_dict({**CONFIG, "hidden_act": name}))
    rng = np.random.default_rng(1)
    weight, bias, x = (rng.standard_normal(s, np.float32) for s in ((80, 48), (80,), (3, 48)))
    layer = model.encoder.layer[0].intermediate
    layer.load_parameters({"dense.weight": weight, "dense.bias": bias}, device="cpu")
    wanted = ACTIVATIONS[name](x.astype(np.float64) @ weight.T + bias)
    got = layer(ct.asarray(x, device="cpu")).numpy()
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        ({"hidden_act": "mish"}, "hidden_act: expected gelu, .*silu, got 'mish'"),
        ({"hidden_act": ["gelu"]}, r"hidden_act: expected gelu, .* got \['gelu'\]"),
        ({"position_embedding_type": "relative"}, "position_.*: expected absolute, got 'relative'"),
        ({"is_decoder": True}, "is_decoder: expected False, got True"),
        ({"hidden_size": 50}, r"hidden_size: expected a multiple of 3 .*, got 50"),
        ({"hidden_size": 0}, "hidden_size: expected int over 0, got 0"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers: expected int over 0, got '3'"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected int over 0, got True"),
        ({"layer_norm_eps": None}, "layer_norm_eps: expected float over 0, got None"),
    ],
)
def test_configs_of_other_models(edit: dict[str, Any], text: str) -> None:
    with pytest.raises(WeightsError, match=f"^somewhere: {text}$"):
        BertConfig.from_dict({**CONFIG, **edit}, "somewhere")


def test_tables_are_as_wide_as_the_model_where_nothing_else_is_said() -> None:
    """They had no columns, so that every token was the bias of a product."""
    config = BertConfig(
        vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=5,
    )  # fmt: skip
    embeddings = BertModel(config).embeddings
    assert embeddings.word_embeddings.weight.shape == (9, 16) and embeddings.project is None


def test_config_without_sizes() -> None:
    rest = {k: v for k, v in CONFIG.items() if k not in ("hidden_size", "vocab_size", "hidden_act")}
    with pytest.raises(WeightsError, match=r"^config\.json: missing: vocab_size, hidden_size$"):
        BertConfig.from_dict(rest)
    assert BertConfig.from_dict({k: v for k, v in CONFIG.items() if k != "hidden_act"}) == (
        BertConfig.from_dict(CONFIG)
    )


@pytest.mark.parametrize("shape", [(5,), (1, 65), (1, 2, 3)])
def test_ids_of_another_shape(shape: tuple[int, ...]) -> None:
    model = model_of(DATA / "tiny-bert", "cpu")
    ids = ct.asarray(np.zeros(shape, np.int32), device="cpu")
    with pytest.raises(ShapeError, match=r"BertModel: expected ids \[batch, up to 64\], got"):
        model(ids, ct.asarray(np.ones(1, np.int32), device="cpu"))


def test_inputs_that_are_no_tensors() -> None:
    model = model_of(DATA / "tiny-bert", "cpu")
    ids, lengths = (ct.zeros(shape, "i32", "cpu") for shape in ((2, 3), (2,)))
    for wrong in ([[1, 2]], np.zeros((2, 3), np.int32), None):
        with pytest.raises(DTypeError, match="BertModel: expected a Tensor, got"):
            model(wrong, lengths)
        with pytest.raises(DTypeError, match="BertModel: expected a Tensor, got"):
            model(ids, wrong)
    with pytest.raises(ShapeError, match=r"attention: expected lengths \[2\], got \[3\]"):
        model(ids, ct.zeros((3,), "i32", "cpu"))
    assert model(ids[:, :0], lengths).shape == (2, 0, 48)
