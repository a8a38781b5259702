"""Each family of encoders against states that transformers computed in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.errors import WeightsError
from centella.models.bert import BertConfig, BertModel
from centella.models.llama_encoder import LlamaEncoderConfig
from centella.tasks.load import load
from tests.support.model_common import DATA

pytest.importorskip("tokenizers")

EVERY = sorted(p for p in (DATA / "encoders").iterdir() if p.is_dir())
HEADED = [p for p in EVERY if p.name.endswith(("labels", "rank", "tags"))]
FOLDERS = [p for p in EVERY if p not in HEADED]
Array = np.ndarray[Any, Any]


def expected(folder: Path) -> dict[str, Array]:
    with np.load(folder / "expected.npz") as arrays:
        return {name: arrays[name] for name in arrays}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_states_equal_transformers(device: ct.Device, folder: Path) -> None:
    """Of padded texts of unequal lengths, and of pairs; a replay sends its inputs alone."""
    model, stored = load(folder, device=device, task="embed").model, expected(folder)
    lengths = stored["lengths"]
    step = ct.jit(lambda *inputs: model(*inputs), device=device)
    inputs = (stored["ids"], lengths, *([stored["types"]] if stored["types"].any() else []))
    step(*inputs)
    with ct.ledger() as led, ct.forbid("compile"):
        states = step.fetch(*inputs).result()
    led.expect(uploads=1, submissions=1, downloads=1, compiles=0, plans=0)
    assert led.upload_bytes <= sum(x.nbytes for x in inputs) + 768
    assert states.dtype == np.float32
    real = np.arange(stored["ids"].shape[1]) < lengths[:, None]
    np.testing.assert_allclose(states[real], stored["states"][real], atol=1e-5)


@pytest.mark.parametrize("folder", [p for p in FOLDERS if (p / "config.json").read_text()
                                    .find("qwen3") < 0 and "gemma" not in p.name],
                         ids=lambda p: p.name)  # fmt: skip
def test_texts_end_to_end_have_the_states_of_padded_ones(device: ct.Device, folder: Path) -> None:
    model, stored = load(folder, device=device, task="embed").model, expected(folder)
    lengths = stored["lengths"]
    padded = model(*(ct.asarray(stored[n], device=device) for n in ("ids", "lengths"))).numpy()
    real = np.arange(padded.shape[1]) < lengths[:, None]
    positions = np.broadcast_to(np.arange(padded.shape[1], dtype=np.int32), real.shape)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = [np.pad(x[real], (0, 5)) for x in (stored["ids"], positions)]  # five behind the last
    ids, position_ids = (ct.asarray(x, device=device) for x in rows)
    states = model.end_to_end(ids, ct.asarray(offsets, device=device), position_ids).numpy()
    np.testing.assert_allclose(states[: offsets[-1]], padded[real], atol=1e-5)


@pytest.mark.devices("cpu", "webgpu", "cuda", "webgpu-hardware")
@pytest.mark.parametrize("name", ["modernbert", "mpnet", "qwen3-embed"])
def test_captures_of_many_sizes_after_one_that_failed(device: ct.Device, name: str) -> None:
    """What the positions need is in no capture but its own."""
    model = load(DATA / "encoders" / name, device=device, task="embed").model
    stored = expected(DATA / "encoders" / name)
    ids, lengths = stored["ids"], stored["lengths"]
    with pytest.raises(ZeroDivisionError):
        ct.jit(lambda *inputs: model(*inputs) / (1 // 0), device=device)(ids, lengths)
    step = ct.jit(lambda *inputs: model(*inputs), device=device)
    for columns in (29, 17, 8, 29):
        states = step.fetch(ids[:, :columns], np.minimum(lengths, columns)).result()
    real = np.arange(29) < lengths[:, None]
    np.testing.assert_allclose(states[real], stored["states"][real], atol=1e-5)
    eager = model(ct.asarray(ids, device=device), ct.asarray(lengths, device=device)).numpy()
    np.testing.assert_array_equal(states[real], eager[real])


@pytest.mark.devices("simulator", "webgpu", "cuda", "webgpu-hardware")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_states_in_16_bits(device: ct.Device, folder: Path) -> None:
    model, stored = load(folder, device=device, dtype="f16", task="embed").model, expected(folder)
    ids, lengths = (ct.asarray(stored[name], device=device) for name in ("ids", "lengths"))
    types = [ct.asarray(stored["types"], device=device)] if stored["types"].any() else []
    states = model(ids, lengths, *types)
    assert states.dtype.name == "f16"
    real = np.arange(ids.shape[1]) < stored["lengths"][:, None]
    error = np.abs(states.numpy().astype(np.float32) - stored["states"])[real]
    assert error.max() < 0.03


@pytest.mark.parametrize("folder", HEADED, ids=lambda p: p.name)
def test_logits_equal_transformers(device: ct.Device, folder: Path) -> None:
    """Of classifiers, cross-encoders and taggers; `types` where a family has them."""
    task, stored = load(folder, device=device), expected(folder)
    ids, lengths, types = (
        ct.asarray(stored[name], device=device) for name in ("ids", "lengths", "types")
    )
    logits = task(ids, lengths, types).numpy()
    for row, length in enumerate(stored["lengths"]):
        got = logits[row, :length] if task.model.config.of_tokens else logits[row]
        np.testing.assert_allclose(got, stored[f"logits{row}"], atol=1e-5)
    plain = load(folder, device=device, task="embed").model  # the head is left out
    np.testing.assert_allclose(
        plain(ids, lengths, types).numpy()[0], stored["states"][0], atol=1e-5
    )


def config_of(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((DATA / "encoders" / name / "config.json").read_text())
    return values


# What the hub's nomic-embed and gte-multilingual write, with the sizes of the small ones.
NOMIC = {
    "model_type": "nomic_bert", "n_embd": 30, "n_layer": 2, "n_head": 3, "n_inner": 44,
    "n_positions": 8192, "max_trained_positions": 2048, "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
    "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False,
    "parallel_block": False, "causal": False, "type_vocab_size": 2, "vocab_size": 120,
    "use_rms_norm": False, "scale_attn_weights": True, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
    "summary_type": "cls_index", "pad_vocab_size_multiple": 64, "use_flash_attn": True,
}  # fmt: skip
NEW = {
    "architectures": ["NewModel"], "auto_map": {"AutoModel": "x"}, "model_type": "new",
    "layer_norm_type": "layer_norm", "logn_attention_clip1": False, "logn_attention_scale": False,
    "pack_qkv": True, "position_embedding_type": "rope", "rope_theta": 20000,
    "rope_scaling": {"factor": 8.0, "type": "ntk"}, "unpad_inputs": False,
    "use_memory_efficient_attention": False,
}  # fmt: skip


def test_configs_as_their_authors_wrote_them() -> None:
    nomic, small = BertConfig.from_dict(NOMIC), BertConfig.from_dict(config_of("nomic"))
    assert nomic.positions == 8192
    assert BertConfig.from_dict({**NOMIC, "rotary_scaling_factor": 2}).positions == 2048
    for name in ("hidden_size", "intermediate_size", "hidden_act", "attention_bias", "mlp_bias"):
        assert getattr(nomic, name) == getattr(small, name)
    np.testing.assert_array_equal(nomic.ropes[0].tables(40), small.ropes[0].tables(40))
    new = BertConfig.from_dict({**config_of("gte"), **NEW, "rope_parameters": None})
    angle = 7 * (20000 * 8.0) ** (-2 * 2 / 10) / 8.0 ** (2 / 10)  # of pair 2 of 5, position 7
    assert new.ropes[0].tables(8)[0][7, 2] == pytest.approx(np.cos(angle))
    renamed = BertModel(new).rename("new.encoder.layer.1.mlp.up_gate_proj.weight")
    assert renamed == "encoder.layer.1.intermediate.dense.weight"
    offsets = {name: BertConfig.from_dict({**config_of(name), "pad_token_id": 0}).position_offset
               for name in ("mpnet", "roberta")}  # fmt: skip
    assert offsets == {"mpnet": 2, "roberta": 1}  # transformers' MPNet takes no other padding
    old = {**config_of("modernbert"), "layer_types": None, "rope_parameters": None}
    old |= {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute"}
    both = {"global_attn_every_n_layers": 2, "global_rope_theta": 5e4, "local_rope_theta": 1e4}
    modern = BertConfig.from_dict({**old, **both})
    assert (modern.windows, modern.rope_of) == ((-1, 5, -1, 5), (0, 1, 0, 1))


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 5,
            "long_factor": [2.0] * 5, "original_max_position_embeddings": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "edit", "text"),
    [
        ("roberta", {"wings": 2}, "wings: this library does not know this field, whose value is 2"),
        ("roberta", {"\x1b[2J" + 5000 * "x": 2}, r"\\x1b\[2Jx[x.]{,200}: this library"),
        ("roberta", {"pad_token_id": 99}, "pad_token_id: expected a whole number below .*, got 99"),
        ("distilbert", {"dim": 0}, "dim: expected int over 0, got 0"),
        ("distilbert", {"n_heads": 4}, r"dim: expected a multiple of 4 \(n_heads\), got 30"),
        ("nomic", {"prenorm": True}, "prenorm: expected False, got True"),
        ("nomic", {"head_dim": 8}, "head_dim: expected 10, got 8"),
        ("gte", {"rope_scaling": {"type": "ntk"}}, "factor: expected a positive number, got None"),
        ("gte", {"rope_scaling": 3}, "rope_scaling: expected an object, got 3"),
        ("nomic", {"rope_parameters": LONGROPE}, "rope_type: expected default, .*, got 'longrope'"),
        ("modernbert", {"local_attention": "8"}, "local_attention: expected a whole number over 0"),
        ("modernbert", {"layer_types": ["full"]}, "layer_types: expected 4 of full_attention, .*"),
        ("albert", {"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 10000, .*"),
        ("albert", {"model_type": "xlnet"}, "model_type: expected albert, bert, .*, got 'xlnet'"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(name: str, edit: dict[str, Any], text: str) -> None:
    with pytest.raises(WeightsError, match=f"^here: {text}"):
        BertConfig.from_dict({**config_of(name), **edit}, "here")


def test_decoders_that_do_not_embed() -> None:
    values = config_of("qwen3-embed")
    for edit, text in (
        ({"rope_parameters": LONGROPE}, "rope_type: expected default, .*, got 'longrope'"),
        ({"use_bidirectional_attention": "yes"}, "expected true or false, got 'yes'"),
    ):
        with pytest.raises(WeightsError, match=text):
            LlamaEncoderConfig.from_dict({**values, **edit}, "here")
