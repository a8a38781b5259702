"""`check_model` of decoders: layers, the continuation, quantised weights, the command."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

import centella as ct
from centella.check import Tokens, check_model
from centella.check.decoder import Decoded, tokens_of
from centella.cli.app import build
from centella.tasks.generate.generator import Generator
from centella.tasks.load import load
from tests.support.gguf_files import random_tensors, write, write_bert
from tests.support.model_common import DATA

MODEL = sys.modules["centella.check.model"]
FOLDER = DATA / "decoders"
PATHS = ["embed_tokens", "layers.0", "layers.1", "layers.2", ""]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers."""
    monkeypatch.setattr(MODEL, "REFERENCE", ("no_such_package",))


@pytest.mark.devices("simulator", "webgpu", "webgpu-hardware", "cuda")
@pytest.mark.usefixtures("alone")
def test_a_decoder_beside_the_cpu(device: ct.Device) -> None:
    report = check_model(FOLDER / "qwen3", device, "f32")
    assert report.ok and report.against == "the CPU, f32"
    assert [layer.path for layer in report.layers] == PATHS
    assert all(layer.error is not None and layer.error < 1e-10 for layer in report.layers)
    assert report.tokens == Tokens(24, 24) and "tokens    24 of 24 equal" in report.card()
    assert report.card().count("squared error") == len(PATHS) + 1


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3-moe", "phi4-mini"])
def test_a_decoder_beside_transformers(family: str, tmp_path: Path) -> None:
    """Also past the length that longrope was trained with, whatever a folder says of sampling."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = Path(shutil.copytree(FOLDER / family, tmp_path / family))
    stated = {"do_sample": True, "repetition_penalty": 9.0, "eos_token_id": list(range(2, 160, 2))}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    report = check_model(folder, "cpu")
    assert report.ok and report.against.startswith("transformers "), report.card()
    assert report.tokens is not None and report.tokens.equal == report.tokens.of == 24


@pytest.mark.usefixtures("alone")
def test_the_first_layer_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(folder: Path, where: Any, dtype: str) -> Generator:
        task = load(folder, where, dtype, task="generate")
        if where != "cpu":
            down: Any = task.model.layers[1].mlp
            down.down_proj.weight = down.down_proj.weight * 1.01
        return task

    monkeypatch.setattr(MODEL, "load", loaded)
    report = check_model(FOLDER / "llama", "simulator", "f32")
    assert not report.ok and report.first is not None and report.first.path == "layers.1"
    assert [layer.path for layer in report.layers if layer.why] == ["layers.1", "layers.2", ""]
    assert report.first.worst is not None and report.first.worst > 1e-4
    assert "first     layers.1 f32 " in report.card() and report.card().count("differs") == 3
    json.dumps(report.as_dict(), allow_nan=False)


def test_tokens_that_are_about_as_likely_may_be_exchanged() -> None:
    row = np.array([[1.0, 5.0, 4.99, 3.0], [0.0, 1.0, 2.0, 3.0]], np.float32)
    right = Decoded({}, row, [1, 3], row)
    assert tokens_of(right, right, 1e-8) == Tokens(2, 2)
    near = tokens_of(replace(right, ids=[2, 0]), right, 1e-5)
    assert (near.equal, near.of, near.expected, near.got, near.why) == (0, 2, 1, 2, "")
    assert "then 2 for 1, which is about as likely" in str(near)
    far = tokens_of(replace(right, ids=[1, 1]), right, 1e-5)
    assert far.why.startswith("token 2: expected 3, got 1, whose logit is lower by 2, more than")
    assert str(far).startswith("1 of 2 equal; token 2")


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A decoder whose rows are whole blocks."""
    config = json.loads((FOLDER / "llama" / "config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config)
    save_file({n: np.asarray(x, np.float32) for n, x in tensors.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    return tmp_path


@pytest.mark.devices("webgpu", "webgpu-hardware", "cuda")
@pytest.mark.usefixtures("alone")
def test_what_quantising_changes(device: ct.Device, wide: Path) -> None:
    eight, four = (check_model(wide, device, "f32", quantize=q) for q in ("q8_0", "q4_0"))
    assert eight.ok and four.ok  # it decides nothing
    assert eight.quantized is not None and four.quantized is not None
    assert 0 < eight.quantized.logits < 1e-2 < four.quantized.logits < 0.5
    assert 0 < eight.quantized.divergence < four.quantized.divergence
    assert [path for path, _ in eight.quantized.layers] == PATHS[:-1]
    assert "quantized q8_0: squared error " in eight.card()


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_gguf_file_is_compared_with_the_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where transformers is installed, which does not read it."""
    monkeypatch.setattr(MODEL, "REFERENCE", ("numpy",))
    file = tmp_path / "model.gguf"
    if name == "bert":
        write_bert(DATA / "tiny-bert", file)
    else:
        write(FOLDER / name, file, "F32")
    report = check_model(file, "simulator")
    assert report.ok and report.against == "the CPU, f32"
    with pytest.raises(ct.WeightsError, match="expected another device than the CPU"):
        check_model(file, "cpu")


@pytest.mark.usefixtures("alone")
def test_the_command_for_a_decoder(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    def call(*given: Any) -> Any:
        return CliRunner().invoke(build(), ["check", *map(str, given)])

    model = ("--model", FOLDER / "llama", "--device")
    result = call(*model, "simulator", "--json", tmp_path / "report.json")
    assert result.exit_code == 0 and "tokens    24 of 24 equal" in result.output
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored["ok"] and stored["tokens"]["equal"] == 24 and len(stored["layers"]) == 5
    missing = call(*model, "cpu")
    assert missing.exit_code == 1 and "transformers" in missing.output
    said = "without it, another device is compared with the CPU: --device webgpu"
    assert said in missing.output
    rows = call(*model, "simulator", "--quantize", "q8_0")
    assert rows.exit_code == 1 and "rows of a multiple of 32" in rows.output
    bare = call("--quantize", "q8_0")
    assert bare.exit_code == 1 and "expected --model DIR" in bare.output
