"""Decoders of each family against logits that transformers computed in float64."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.errors import ShapeError, WeightsError
from centella.models.llama import MLP, LlamaModel
from centella.models.llama_config import FAMILIES, LlamaConfig
from centella.models.rope import Rope
from centella.nn.block_cache import BlockCache
from centella.nn.past import Past
from centella.ops.attention import table
from centella.tasks.load import load
from tests.models.test_bert import ACTIVATIONS
from tests.support.model_common import DATA

FOLDER = DATA / "decoders"
NAMES = sorted(p.name for p in FOLDER.iterdir())
TOLERANCE = 1e-4  # of logits of size 1 to 10, in f32
EVERY = ("cpu", "webgpu", "webgpu-hardware", "cuda")


@functools.cache
def model_of(name: str, device: ct.Device, dtype: str = "f32") -> LlamaModel:
    return load(FOLDER / name, device, dtype).model  # type: ignore[no-any-return]


def expected(name: str) -> dict[str, Any]:
    return dict(np.load(FOLDER / name / "expected.npz"))


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((FOLDER / name / "config.json").read_text()), **changes}


def test_each_family_has_a_checkpoint() -> None:
    assert {config_of(name)["model_type"] for name in NAMES} == set(FAMILIES)


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("name", NAMES)
def test_logits_at_every_position(device: ct.Device, name: str) -> None:
    stored = expected(name)
    logits = model_of(name, device)(ct.asarray(stored["ids"], device=device))
    np.testing.assert_allclose(logits.numpy(), stored["logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.devices("webgpu")
@pytest.mark.usefixtures("costly_launches")
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_launches_of_a_step_on_a_gpu(device: ct.Device, name: str) -> None:
    """A layer: q k v, rotation and cache, attention, out, gate and up, down; three beside them."""
    model = model_of(name, device)
    past, ids = model.past(1, 16, device), ct.zeros((1, 1), "i32", device)
    device.synchronize()
    with ct.ledger() as led:
        model(ids, past).numpy()
    led.expect(launches=6 * len(model.layers) + 3, submissions=1)


@pytest.mark.devices("webgpu")
@pytest.mark.usefixtures("costly_launches")
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@pytest.mark.parametrize("blocks", [False, True])
def test_a_step_behind_many_keys_on_a_gpu(
    device: ct.Device, name: str, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product after attention adds up its parts: a launch less a layer; weights of 16 bits.

    Across the border of two parts, in steps of one plan.
    """
    row = table.ROWS["nvidia"]
    monkeypatch.setitem(table.ROWS, "software", replace(table.ROWS["software"], joined=row.joined))
    stored, model = expected(name), model_of(name, device, "auto")
    text = np.concatenate([stored["ids"][0], stored["greedy"]])[None]
    wanted = model(ct.asarray(text, device=device), model.past(1, 128, device)).numpy()
    past, begin = model.past(1, 128, device), 61
    pool = BlockCache(
        model.config.num_key_value_heads, model.config.head_dim, 3,
        num_layers=len(model.layers), device=device,
    )  # fmt: skip

    def at(start: int) -> Past[Any]:
        rows = ct.asarray(np.array([[start, 2, 1]], np.int32), device=device)
        return replace(past, cache=pool.view(rows)) if blocks else past

    model(ct.asarray(text[:, :begin], device=device), at(0)).numpy()
    for n in range(begin, 67):
        ids, now = ct.asarray(text[:, n : n + 1], device=device), at(n)
        device.synchronize()
        with ct.ledger() as led:
            got = model(ids, now).numpy()
        np.testing.assert_allclose(got[:, 0], wanted[:, n], atol=TOLERANCE, rtol=0)
        layer = 5 if name == "qwen3" else 7  # which has two norms behind products
        led.expect(launches=layer * len(model.layers) + (2 if blocks else 3), submissions=1)
        if n > begin:
            led.expect(compiles=0, plans=0)


@pytest.mark.devices(*EVERY)
def test_logits_of_a_text_within_the_trained_length(device: ct.Device) -> None:
    """Longrope's divisors of short texts; other tests have those of long ones."""
    stored, model = expected("phi4-mini"), model_of("phi4-mini", device)
    short = stored["short"]
    ids = np.ascontiguousarray(stored["ids"][:, : short.shape[1]])
    logits = model(ct.asarray(ids, device=device)).numpy()
    np.testing.assert_allclose(logits, short, atol=TOLERANCE, rtol=0)
    assert np.abs(short - stored["logits"][:, : short.shape[1]]).max() > 100 * TOLERANCE


@pytest.mark.devices(*EVERY)
@pytest.mark.first("chunk", "webgpu")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_give_what_the_whole_gives(device: ct.Device, name: str, chunk: int) -> None:
    """Of the stored ids, and of the first row with the forty greedy tokens that follow it."""
    stored, model = expected(name), model_of(name, device)
    ids = stored["ids"]
    if chunk == 64:  # which the prompt of 77 tokens crosses
        ids = np.concatenate([ids[:1], stored["greedy"][None]], 1)
    past = model.past(len(ids), 128, device)
    parts = [
        model(ct.asarray(ids[:, at : at + chunk], device=device), past).numpy()
        for at in range(0, ids.shape[1], chunk)
    ]
    logits = np.concatenate(parts, 1)
    known = stored["logits"][: len(ids)]
    np.testing.assert_allclose(logits[:, :37], known, atol=TOLERANCE, rtol=0)
    np.testing.assert_array_equal(logits[0, 36:-1].argmax(-1), ids[0, 37:])


@pytest.mark.devices(*EVERY)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_keys_and_values_in_i8(device: ct.Device, name: str) -> None:
    """The error's root mean square is within 6 % of the size of logits, which is 1 to 3.9 %.

    Weights of this spread amplify roundings, as in `test_narrow_dtypes`.
    """
    stored, model = expected(name), model_of(name, device)
    past = model.past(2, 64, device, dtype=ct.i8)
    parts = np.split(stored["ids"], [5, 6], axis=1)
    logits = [
        model(ct.asarray(np.ascontiguousarray(x), device=device), past).numpy() for x in parts
    ]
    off = np.concatenate(logits, 1) - stored["logits"]
    error, size = (np.sqrt(np.mean(a**2)) for a in (off, stored["logits"]))
    assert 0 < error < 0.06 * size, (error, size)


# Root mean square of the error as a part of that of logits, in f16 and bf16 on the CPU. Weights of
# this spread amplify roundings; bf16 is 8 times coarser.
NARROW = {
    "gemma2": (0.0036, 0.032), "gemma3": (0.0016, 0.012), "granite": (0.0014, 0.0134),
    "llama": (0.0041, 0.0343), "llama-bias": (0.0027, 0.0234), "llama-dynamic": (0.0023, 0.0216),
    "mistral": (0.0036, 0.030),
    "olmo2": (0.0013, 0.0101), "phi3": (0.0030, 0.0221), "phi4-mini": (0.0033, 0.0241),
    "qwen2": (0.0034, 0.0272), "qwen3": (0.0018, 0.0144), "qwen3-moe": (0.0012, 0.0092),
    "smollm3": (0.0029, 0.0274),
}  # fmt: skip


@pytest.mark.devices("cpu", "webgpu-hardware", "cuda")
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_narrow_dtypes(device: ct.Device, name: str, dtype: str) -> None:
    """Within 1.5 times what the CPU is off."""
    stored = expected(name)
    logits = model_of(name, device, dtype)(ct.asarray(stored["ids"], device=device)).numpy()
    error, size = (np.sqrt(np.mean(a**2)) for a in (logits - stored["logits"], stored["logits"]))
    assert error < 1.5 * NARROW[name][dtype == "bf16"] * size, (error, size)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": "mamba"}, "model_type: expected llama"),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads: expected a divisor of 6"),
        ("llama", {"hidden_act": "tan"}, "hidden_act: expected"),
        ("llama", {"rms_norm_eps": "x"}, "rms_norm_eps: expected a number"),
        ("llama", {"vocab_size": None}, "vocab_size: expected a whole number over 0"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: this library does"),
        ("llama", {"rope_parameters": {"rope_type": "su"}}, "rope_type: expected default"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor: expected a positive"),
        ("phi3", {"partial_rotary_factor": 0.1, "rope_parameters": None}, "rotary columns"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1, since heads"),
        (
            "qwen3",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor: expected 1, since heads of this family turn as a whole",
        ),
        ("qwen3-moe", {"num_local_experts": None}, "num_local_experts: expected a whole number"),
        ("qwen3-moe", {"num_experts": 0}, "num_experts: expected a whole number over 0"),
        ("qwen3-moe", {"num_experts_per_tok": 8}, "num_experts_per_tok: expected at most 7, got 8"),
        ("qwen3-moe", {"mlp_only_layers": 1}, "mlp_only_layers: expected a list of whole numbers"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: expected a whole number"),
        ("qwen3-moe", {"norm_topk_prob": 1}, "norm_topk_prob: expected true or false"),
        ("qwen3-moe", {"moe_intermediate_size": "24"}, "moe_intermediate_size: expected a whole"),
        ("qwen3", {"num_experts": 7}, "num_experts: this library does not know"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types: expected 3 of"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: expected 3 of"),
        ("smollm3", {"no_rope_layers": [1, "x", 0]}, "no_rope_layers: expected 3 of"),
        (
            "smollm3",
            {"no_rope_layers": None, "no_rope_layer_interval": "4"},
            "no_rope_layer_interval: expected a whole number",
        ),
        ("llama", {"num_hidden_layers": 2**32 - 1}, "num_hidden_layers: expected at most 10000"),
        ("llama", {"head_dim": 2**40}, "head_dim: expected at most 65536"),
        ("llama", {"hidden_size": 10**400}, "hidden_size: expected at most"),
        ("llama", {"hidden_act": ["silu"]}, "hidden_act: expected"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps: expected a number"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a number"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters: expected an object"),
        ("llama", {"rope_parameters": None, "rope_scaling": 3}, "rope_scaling: expected an object"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": 3}},
            "rope_parameters: full_attention: expected an object",
        ),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a number over 0"),
        ("granite", {"logits_scaling": 0}, "logits_scaling: expected a number over 0"),
        (
            "gemma3",
            {"layer_types": None, "sliding_window_pattern": "6"},
            "sliding_window_pattern: expected a whole number",
        ),
        (
            "qwen2",
            {"layer_types": None, "use_sliding_window": True, "max_window_layers": "1"},
            "max_window_layers: expected a whole number",
        ),
        (
            "qwen2",
            {"layer_types": None, "use_sliding_window": 3},
            "use_sliding_window: expected tr",
        ),
        ("llama", {"rope_interleaved": True}, "rope_interleaved: this library does not know"),
        ("phi4-mini", {"full_attn_mod": 2}, "full_attn_mod: expected 1, got 2"),
        ("phi4-mini", {"interpolate_factor": 4}, "interpolate_factor: expected 1, got 4"),
        (
            "phi4-mini",
            {"original_max_position_embeddings": 64},
            "original_max_position_embeddings: expected 32, as the rotary embedding has it, got 64",
        ),
        ("llama", {"use_qk_norm": True}, "use_qk_norm: expected False, got True"),
        ("gemma2", {"sliding_window_size": 9}, "sliding_window_size: expected 8, got 9"),
        *[
            (
                "phi3",
                {"rope_parameters": None, "partial_rotary_factor": bad},
                "partial_rotary_factor: expected a number over 0",
            )
            for bad in (10**400, "x", float("inf"), -1, 0, True)
        ],
    ],
)
def test_configs_that_cannot_be(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=f"^here: {message}"):
        LlamaConfig.from_dict(config_of(name, **changes), "here")


DIVISORS = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_type": "dynamic"}, "factor: expected a positive number for rope_type dynamic"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}, "rope_theta: expected a number ov"),
        ({"rope_type": "yarn"}, "factor: expected a positive number for rope_type yarn, got None"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate: expected true or fals"),
        ({"rope_type": "longrope", **DIVISORS, "original_max_position_embeddings": 1},
         "original_max_position_embeddings: expected a number over 1"),
        ({"rope_type": "longrope", **DIVISORS, "original_max_position_embeddings": 0.5},
         "original_max_position_embeddings: expected a number over 1"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4}, "long_factor: expected 4 positive"),
        ({"rope_type": "longrope", **DIVISORS, "long_factor": [10**400] * 4}, "long_factor: expec"),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
         "high_freq_factor: expected a number over 4"),
        ({"rope_type": "linear", "factor": 10**400}, "factor: expected a positive number"),
        ({"rope_type": ["linear"]}, "rope_type: expected default"),
        ({"rope_type": "default", "factor": 2.0}, "'factor': rope_type default does not read"),
        ({"rope_type": "yarn", "factor": 2.0, "attn_factor": 0.5}, "'attn_factor': rope_type yarn"),
        ({"rope_type": "llama3", "beta_fast": 32.0}, "'beta_fast': rope_type llama3 does not read"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "'partial_rotary_factor': rope"),
        ({"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}, "'llama_4_scaling_b"),
    ],
)  # fmt: skip
def test_scalings_that_cannot_be(values: dict[str, Any], message: str) -> None:
    values = {"rope_theta": 10000.0, **values}
    with pytest.raises(WeightsError, match=f"^here: {message}"):
        Rope(values, values.pop("dim", 8), 128, "here")


def test_values_of_a_scaling_that_change_nothing() -> None:
    """A default factor; how a model was trained; shares of axes, of which a text has one."""
    more = {"attn_factor": 1.0, "finetuned": True, "mrope_section": [2, 1, 1], "mscale": None}
    values = {"rope_type": "linear", "factor": 2.0}
    one, two = (Rope(v, 8, 128, "here").tables(64) for v in (values, {**values, **more}))
    np.testing.assert_array_equal(one, two)


def test_yarn_without_a_factor_has_that_of_its_lengths() -> None:
    values = {"rope_type": "yarn", "original_max_position_embeddings": 32}
    one, two = (Rope(v, 8, 128, "here").tables(64) for v in (values, {**values, "factor": 4.0}))
    np.testing.assert_array_equal(one, two)


def test_smollm3_windows_are_on_layers_without_rope() -> None:
    values = config_of("smollm3", layer_types=None, sliding_window=7, use_sliding_window=True)
    assert LlamaConfig.from_dict(values).windows == (0, 0, 7)
    assert LlamaConfig.from_dict({**values, "use_sliding_window": False}).windows == (0, 0, 0)


def test_fields_that_change_nothing() -> None:
    more = {"is_llama_config": True, "transformers.js_config": {}, "rope_interleaved": False}
    one, two = (LlamaConfig.from_dict(config_of("llama", **c)) for c in ({}, more))
    assert one.sizes() == two.sizes()


def test_older_fields_say_the_same() -> None:
    """Configs of transformers 4: rope_theta and rope_scaling, patterns in place of layer_types."""
    new = config_of("llama")
    scaling = dict(new.pop("rope_parameters"))
    old = {**new, "rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    one, two = (LlamaConfig.from_dict(c).ropes[0].tables(64) for c in (config_of("llama"), old))
    np.testing.assert_array_equal(one, two)
    gemma = config_of("gemma3", layer_types=None, sliding_window_pattern=3, rope_parameters=None)
    assert LlamaConfig.from_dict(gemma).windows == (8, 8, 0, 8)
    assert [r.tables(2)[0][1, 1] for r in LlamaConfig.from_dict(gemma).ropes] == [
        r.tables(2)[0][1, 1] for r in LlamaConfig.from_dict(config_of("gemma3")).ropes
    ]
    qwen = config_of("qwen2", layer_types=None)
    assert LlamaConfig.from_dict(qwen).windows == (0, 9, 9)
    assert LlamaConfig.from_dict({**qwen, "use_sliding_window": False}).windows == (0, 0, 0)


@pytest.mark.parametrize("name", ["swish", "quick_gelu", "gelu_fast", "tanh"])
def test_gates_have_a_name(name: str) -> None:
    config = LlamaConfig.from_dict({**config_of("llama"), "hidden_act": name})
    rng, inner = np.random.default_rng(1), config.intermediate_size
    both, down, x = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((2 * inner, config.hidden_size), (config.hidden_size, inner), (1, 3, 48))
    )
    mlp = MLP(config)
    named = {"gate_proj.weight": both[:inner], "up_proj.weight": both[inner:],
             "down_proj.weight": down}  # fmt: skip
    mlp.load_parameters(named, device="cpu")
    y = x.astype(np.float64) @ both.T
    wanted = (ACTIVATIONS[name](y[..., :inner]) * y[..., inner:]) @ down.T
    got = mlp(ct.asarray(x, device="cpu"), None).numpy()
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())


def test_longrope_by_length() -> None:
    values = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
              "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 32,
    }  # fmt: skip
    rope = Rope(values, 8, 128, "here")
    growth = np.sqrt(1 + np.log(4) / np.log(32))
    plain = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    for capacity, divisor in ((32, [1.0] * 4), (33, [2.0, 3.0, 4.0, 5.0])):
        cos, _ = rope.tables(capacity)
        wanted = np.cos(31 * plain / np.array(divisor)) * growth
        np.testing.assert_allclose(cos[31], wanted, atol=1e-6)
    with pytest.raises(WeightsError, match="long_factor: expected 4 positive numbers"):
        Rope({**values, "long_factor": [1.0]}, 8, 128, "here").tables(100)


def test_a_past_takes_the_name_of_a_device() -> None:
    """mypy reads this test, too."""
    model, ids = model_of("llama", ct.device("cpu")), ct.zeros((1, 3), "i32", "cpu")
    wanted = model(ids).numpy()
    for past in (model.past(1, 8, "cpu"), model.past(1, 8, device=ct.device("cpu"))):
        assert past.cache.device is ct.device("cpu")
        np.testing.assert_array_equal(model(ids, past).numpy(), wanted)
    with pytest.raises(ct.DeviceError):
        model.past(1, 8, "")


def test_bad_calls(tmp_path: Path) -> None:
    model = model_of("qwen3", ct.device("cpu"))
    with pytest.raises(ShapeError, match=r"expected ids \[batch, tokens\], got \[3\]"):
        model(ct.asarray(np.zeros(3, np.int32), device="cpu"))
    with pytest.raises(ShapeError, match="capacity of up to 128 tokens"):
        model.past(1, 129)
    dynamic = model_of("llama-dynamic", ct.device("cpu"))
    text = r"capacity of up to 128 tokens .*, got 129; beyond it rope_type dynamic has other freq"
    with pytest.raises(ShapeError, match=text):
        dynamic(ct.asarray(np.zeros((1, 129), np.int32), device="cpu"))
    past = model.past(1, 8)
    with pytest.raises(ct.KVCacheFullError, match="9 tokens at once; the capacity is 8"):
        model(ct.asarray(np.zeros((1, 9), np.int32), device="cpu"), past)
    assert past.cache.length == 0


def test_ids_that_do_not_fit_leave_the_past_as_it_was() -> None:
    device, other = ct.device("cpu"), ct.device("cpu", cache=ct.PipelineCache())
    model = model_of("qwen3", device)

    def ids(rows: int) -> ct.Tensor:
        return ct.asarray(np.arange(2 * rows, dtype=np.int32).reshape(rows, 2), device=device)

    misfits: list[tuple[Past[ct.KVCache], int, type[Exception]]] = [
        (model.past(1, 8), 2, ShapeError),
        (model.past(2, 8), 1, ShapeError),
        (model.past(2, 8, other), 2, ct.DeviceError),
        (model.past(2, 8, dtype=ct.f16), 2, ct.DTypeError),
    ]
    for past, rows, kind in misfits:
        with pytest.raises(kind):
            model(ids(rows), past)
        assert past.cache.lengths == (0,) * past.cache.shape[0]
        assert not past.cache.positions.numpy().any()
    wanted = model(ids(1)).numpy()
    np.testing.assert_array_equal(model(ids(1), misfits[0][0]).numpy(), wanted)
    view = BlockCache(2, 16, 4, num_layers=len(model.layers), device=device).view(
        ct.zeros((1, 3), "i32", device)
    )
    with pytest.raises(ShapeError):
        model(ids(2), replace(misfits[0][0], cache=view))


@pytest.mark.parametrize("name", ["gemma3", "qwen3", "olmo2"])
def test_a_state_dict_of_arrays_is_the_model(name: str) -> None:
    model, stored = model_of(name, ct.device("cpu")), expected(name)
    other = LlamaModel(model.config)
    arrays = {path: tensor.numpy() for path, tensor in model.state_dict().items()}
    other.load_parameters(arrays, device="cpu")
    logits = other(ct.asarray(stored["ids"], device="cpu"))
    np.testing.assert_allclose(logits.numpy(), stored["logits"], atol=TOLERANCE, rtol=0)
