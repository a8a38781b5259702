"""GGUF files: what they hold, what they may not hold, and the models and tokenizers in them."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.errors import WeightsError
from centella.models.llama_gguf import tensors_of
from centella.nn import Linear, RMSNorm
from centella.specs import Caps
from centella.tasks.load import _dtypes, load
from centella.weights.fingerprint import fingerprint
from centella.weights.gguf import KINDS, GGUFTensor, open_gguf
from tests.support.model_common import DATA

pytest.importorskip("gguf")
from tests.support.gguf_files import write  # needs the package

FOLDER = DATA / "decoders"
NAMES = sorted(p.name for p in FOLDER.iterdir())
# What the format cannot say of the small checkpoints: their folders without it.
PLAIN: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "layer_types": None},
    "qwen2": {"use_sliding_window": False, "layer_types": None},
    "smollm3": {"no_rope_layers": None},
}
QUANTISED = [kind.name for kind in KINDS.values() if kind.dtype is None]
TEXTS = ["", "Hello, world", "  two  spaces\n\nlines\t", "it's 12345 o'clock", "naïve café 東京 🙂",
         "x" * 100, "<|im_start|>user\nhi<|im_end|>"]  # fmt: skip


def folder_of(name: str, path: Path) -> Path:
    """A small decoder's folder, without what a GGUF file cannot say."""
    folder = Path(shutil.copytree(FOLDER / name, path / name))
    config = {**json.loads((folder / "config.json").read_text()), **PLAIN.get(name, {})}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize("kind", ["F32", "BF16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_the_model_of_its_folder(name: str, kind: str, tmp_path: Path) -> None:
    folder, file = folder_of(name, tmp_path), tmp_path / "model.gguf"
    write(folder, file, kind)
    ids = ct.asarray(np.load(FOLDER / name / "expected.npz")["ids"], device="cpu")
    wanted, got = (load(path, "cpu", "f32")(ids).numpy() for path in (folder, file))
    np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=0)
    if name not in PLAIN:
        np.testing.assert_allclose(
            got, np.load(FOLDER / name / "expected.npz")["logits"], atol=1e-4, rtol=0
        )


# -- a model in several files ----------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The files of a small model that is split, as the `gguf` package writes them."""
    write(FOLDER / "qwen3", tmp_path / "model.gguf", each=12)
    return sorted(tmp_path.glob("model-*.gguf"))


def test_a_model_in_several_files_is_that_of_one(parts: list[Path], tmp_path: Path) -> None:
    write(FOLDER / "qwen3", tmp_path / "whole.gguf")
    ids = ct.asarray(np.load(FOLDER / "qwen3" / "expected.npz")["ids"], device="cpu")
    wanted = load(tmp_path / "whole.gguf", "cpu")(ids).numpy()
    assert len(parts) == 3 and parts[0].name == "model-00001-of-00003.gguf"
    for file in (parts[0], parts[2]):  # any one of them
        np.testing.assert_array_equal(load(file, "cpu")(ids).numpy(), wanted)
        assert open_gguf(file).file == parts[0]
    first = fingerprint(parts[0])
    assert list(first) == [file.name for file in parts] and fingerprint(parts[1]) == first


def replaced(file: Path, old: bytes, new: bytes) -> None:
    raw = file.read_bytes()
    assert raw.count(old) == 1
    file.write_bytes(raw.replace(old, new))


def of_count(count: int) -> bytes:
    return text("split.count") + struct.pack("<IH", 2, count)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p[1].unlink(), "00002-of-00003.gguf: expected a GGUF file, got nothing"),
        (lambda p: shutil.copy(p[2], p[1]), "00002-of-00003.gguf: split.no: expected 1, got 2"),
        (lambda p: write(FOLDER / "qwen3", p[1]), "00002-of-00003.gguf: split.no: expected 1, got"),
        (lambda p: replaced(p[1], of_count(3), of_count(2)), "split.count: expected 3, got 2"),
        (lambda p: replaced(p[1], b"blk.1.ffn_up", b"blk.0.ffn_up"), "in one part, got it in two"),
        (lambda p: replaced(p[0], b"\x05\0\0\0\x24", b"\x05\0\0\0\x25"), "the 36 tensors of the 3"),
        (lambda p: p[2].write_bytes(p[2].read_bytes()[:-1]), "00003-of-00003.gguf: .*truncated"),
    ],
    ids=["missing", "another", "whole", "count", "twice", "total", "cut"],
)
def test_parts_that_do_not_belong_together(spoil: Any, message: str, parts: list[Path]) -> None:
    spoil(parts)
    for file in (parts[0], parts[2]):
        with pytest.raises(WeightsError, match=message):
            load(file, "cpu")


def test_names_of_parts(parts: list[Path]) -> None:
    said = r"name one of its \.gguf files, such as .*00001-of-00003"
    with pytest.raises(WeightsError, match=said):
        load(parts[0].parent, "cpu")
    alone = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(WeightsError, match=r"ends in -00001-of-00003.gguf .* got 'model.gguf'"):
        load(alone, "cpu")
    beyond = parts[1].rename(parts[1].with_name("model-00004-of-00003.gguf"))
    with pytest.raises(WeightsError, match=r"to -00003-of-00003.gguf .* got 'model-00004-of-0000"):
        load(beyond, "cpu")


def test_parts_keep_how_their_names_are_written(parts: list[Path]) -> None:
    other = [part.rename(part.with_name(f"A\nb-0000{i}-OF-00003.Gguf"))
             for i, part in enumerate(parts, 1)]  # fmt: skip
    assert open_gguf(other[1]).file == other[0]
    assert list(fingerprint(other[1])) == [file.name for file in other]


def test_parts_are_opened_up_to_one_that_is_wrong(parts: list[Path]) -> None:
    """Ten thousand names for one file cost no more than two."""
    shutil.copy(parts[0], parts[1])
    parts[2].unlink()
    with pytest.raises(WeightsError, match=r"00002-of-00003.gguf: split.no: expected 1, got 0"):
        open_gguf(parts[0])


def test_more_parts_than_anybody_makes(parts: list[Path]) -> None:
    replaced(parts[0], of_count(3), of_count(65_535))
    many = parts[0].rename(parts[0].with_name("model-00001-of-65535.gguf"))
    with pytest.raises(WeightsError, match=r"split\.count: expected up to 10000, got 65535"):
        open_gguf(many)


def test_a_file_that_was_merged(parts: list[Path]) -> None:
    """It keeps what the first part says, with a count of 0."""
    replaced(parts[0], of_count(3), of_count(0))
    merged = parts[0].rename(parts[0].with_name("merged.gguf"))
    assert open_gguf(merged).file == merged


@pytest.mark.parametrize("number", ["00004-of-00003", "00000-of-00000", "00001-of-65535"])
def test_a_whole_file_that_has_a_name_as_parts_have(number: str, tmp_path: Path) -> None:
    file = tmp_path / f"model-{number}.gguf"
    write(FOLDER / "qwen3", file)
    assert open_gguf(file).file == file and list(fingerprint(file)) == [file.name]


# -- quantised files ------------------------------------------------------------------------------


def numbers_of(family: str, **more: Any) -> dict[str, Any]:
    """The config of a family with rows of whole blocks."""
    values = json.loads((FOLDER / family / "config.json").read_text())
    return {
        **values, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2, **more,
    }  # fmt: skip


def logits_of(kinds: Any, numbers: dict[str, Any], path: Path, widened: bool) -> tuple[Any, Any]:
    """A file's model on the CPU, and the logits of some ids."""
    file = path / f"{widened}.gguf"
    write(FOLDER / numbers["model_type"], file, kinds, widened=widened, numbers=numbers)
    model = load(file, "cpu", "f32")
    ids = ct.asarray(np.arange(24, dtype=np.int32).reshape(2, 12) * 13 % 320, device="cpu")
    return model.model, model(ids).numpy()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_file_is_the_model_of_what_it_stands_for(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    """Rows of q and k that change places, stacked parameters, embedding and head; in planes."""
    numbers = numbers_of("llama", tie_word_embeddings=tied)
    model, got = logits_of(kind, numbers, tmp_path, False)
    _, wanted = logits_of(kind, numbers, tmp_path, True)
    np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max(), rtol=0)
    layer = model.layers[1]
    weights = [layer.self_attn.qkv, layer.self_attn.o_proj, layer.mlp.gate_up, layer.mlp.down_proj,
               model.embed_tokens, *([] if tied else [model.lm_head])]  # fmt: skip
    for weight in (w.weight for w in weights):
        assert isinstance(weight, ct.QTensor) and weight.format.name == kind.lower()
    for name, tensor in model.named_parameters():
        assert tensor.ndim == 1 or f".{kind.lower()}." in name


MOE = {"num_experts": 5, "num_local_experts": None, "moe_intermediate_size": 256,
       "intermediate_size": 256, "num_hidden_layers": 1}  # fmt: skip


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "MXFP4"])
def test_experts_of_a_quantised_file_stay_in_planes(kind: str, tmp_path: Path) -> None:
    numbers, kinds = numbers_of("qwen3-moe", **MOE), {"down_proj": "Q8_0", "": kind}
    model, got = logits_of(kinds, numbers, tmp_path, False)
    _, wanted = logits_of(kinds, numbers, tmp_path, True)
    np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max(), rtol=0)
    mlp = model.layers[0].mlp
    assert mlp.experts.gate_proj.format.name == mlp.experts.up_proj.format.name == kind.lower()
    assert mlp.experts.down_proj.format.name == "q8_0" and mlp.gate.weight.dtype is ct.f32
    again = type(model)(model.config, model.dtype)
    again.load_parameters({n: t.numpy() for n, t in model.state_dict().items()}, device="cpu")
    ids = ct.asarray(np.array([[1, 2, 3]], np.int32), device="cpu")
    np.testing.assert_array_equal(again(ids).numpy(), model(ids).numpy())


def test_experts_quantised_at_load(tmp_path: Path) -> None:
    file, numbers = tmp_path / "model.gguf", numbers_of("qwen3-moe", **MOE)
    write(FOLDER / "qwen3-moe", file, "BF16", numbers=numbers)
    plain, model = (load(file, "cpu", "f32", quantize=q).model for q in (None, "q8_0"))
    mlp, other = model.layers[0].mlp, plain.layers[0].mlp
    wanted = ct.quantize(other.experts.up_proj.numpy().reshape(-1, 256), "q8_0")
    for got, plane in zip(mlp.experts.up_proj.planes, wanted.planes, strict=True):
        np.testing.assert_array_equal(got.numpy(), plane.numpy())
    assert isinstance(mlp.gate.weight, ct.Tensor)  # small differences would choose others
    with pytest.raises(ct.DTypeError, match="gate_proj and up_proj of one format, got"):
        mixed, ids = {"up_proj": "Q8_0", "": "Q4_0"}, np.array([[1, 2]], np.int32)
        write(FOLDER / "qwen3-moe", file, mixed, numbers=numbers)
        load(file, "cpu", "f32")(ct.asarray(ids, device="cpu"))


@pytest.mark.devices("webgpu", "webgpu-hardware", "cuda")
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_a_file_of_q4_k_on_a_gpu(device: ct.Device, family: str, tmp_path: Path) -> None:
    """Many rows, and steps of one, as on the CPU; experts too."""
    numbers, file = numbers_of(family, **(MOE if "moe" in family else {})), tmp_path / "model.gguf"
    write(FOLDER / family, file, {"down_proj": "Q8_0", "": "Q4_K"}, numbers=numbers)
    host, model = (load(file, d, "f32") for d in ("cpu", device))
    ids = np.arange(24, dtype=np.int32).reshape(2, 12) * 13 % 320
    wanted, got = (m(ct.asarray(ids, device=m.model.device)).numpy() for m in (host, model))
    np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max(), rtol=0)
    asked = [m.generate([ids[0].tolist(), [7]], max_new_tokens=6, ignore_eos=True)
             for m in (host, model)]  # fmt: skip
    assert [g.ids for g in asked[0]] == [g.ids for g in asked[1]]


MIXED = {"v_proj": "Q6_K", "up_proj": "F16", "down_proj": "Q8_0", "": "Q4_K"}


def test_a_file_of_several_formats_keeps_each(tmp_path: Path) -> None:
    numbers = numbers_of("llama")
    model, got = logits_of(MIXED, numbers, tmp_path, False)
    _, wanted = logits_of(MIXED, numbers, tmp_path, True)
    np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max(), rtol=0)
    layer = model.layers[0]
    qkv, both = layer.self_attn.qkv.weight, layer.mlp.gate_up.weight
    assert [p.format.name for p in qkv.parts] == ["q4_k", "q6_k"]  # q and k are one product
    assert [type(p) for p in both.parts] == [ct.QTensor, ct.Tensor]
    assert qkv.shape == (384, 256) and qkv.parts[0].shape == (320, 256)
    state = model.state_dict()
    assert "layers.0.self_attn.qkv.weight.1.q6_k.scale" in state
    again = type(model)(model.config, model.dtype)
    again.load_parameters({n: t.numpy() for n, t in state.items()}, device="cpu")
    ids = ct.asarray(np.array([[1, 2, 3]], np.int32), device="cpu")
    np.testing.assert_array_equal(again(ids).numpy(), model(ids).numpy())
    del state["layers.0.self_attn.qkv.weight.1.q6_k.scale"]
    with pytest.raises(WeightsError, match=r"missing: layers\.0\.self_attn\.q_proj"):
        type(model)(model.config, model.dtype).load_parameters(state, device="cpu")


@pytest.mark.parametrize("format", ["q8_0", "q4_0"])
def test_weights_quantised_at_load(format: str, tmp_path: Path) -> None:
    """Those of `ct.quantize`, of what the file has, and nothing but matrices."""
    file, numbers = tmp_path / "model.gguf", numbers_of("llama")
    write(FOLDER / "llama", file, {"v_proj": "Q4_1", "": "BF16"}, numbers=numbers)
    plain, model = (load(file, "cpu", "f32", quantize=q).model for q in (None, format))
    for layer, other in zip(model.layers, plain.layers, strict=True):
        for ours, whole in ((layer.mlp.gate_up, other.mlp.gate_up), (layer.self_attn.o_proj,
                            other.self_attn.o_proj)):  # fmt: skip
            for got, wanted in zip(
                ours.weight.planes, ct.quantize(whole.weight, format).planes, strict=True
            ):
                np.testing.assert_array_equal(got.numpy(), wanted.numpy())
        q, v = layer.self_attn.qkv.weight.parts  # v is quantised already
        assert (q.format.name, v.format.name) == (format, "q4_1")
        assert layer.input_layernorm.scale.dtype is ct.f32
    assert model.embed_tokens.weight.format.name == model.lm_head.weight.format.name == format
    ids = ct.asarray(np.array([[5, 17, 4]], np.int32), device="cpu")
    near = 0.02 if format == "q8_0" else 0.3
    difference = np.abs(model(ids).numpy() - plain(ids).numpy()).max()
    assert difference < near * np.abs(plain(ids).numpy()).max()


@pytest.mark.parametrize(
    ("kinds", "told"), [({"": "Q8_0"}, True), ({"v_proj": "Q8_0", "": "F16"}, False)]
)
def test_weights_that_are_quantised_already_are_told(
    kinds: dict[str, str], told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "model.gguf"
    write(FOLDER / "llama", file, kinds, numbers=numbers_of("llama"))
    load(file, "cpu", "f32", quantize="q4_0")
    text = f"{file}: quantize: q4_0 changes nothing: the weights of the file are quantised already"
    assert (text in caplog.messages) == told
    caplog.clear()
    load(file, "cpu", "f32")
    assert not caplog.messages


def test_what_cannot_be_quantised_at_load(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"embed_tokens\.weight: expected rows of a multiple"):
        load(FOLDER / "qwen3", "cpu", quantize="q8_0")
    with pytest.raises(ct.ShapeError, match="load: expected quantize of q8_0, q4_0, got 'q4_k'"):
        load(FOLDER / "qwen3", "cpu", quantize="q4_k")
    with pytest.raises(
        WeightsError, match="quantize: expected a decoder or a model to transcribe with"
    ):
        load("minilm", "cpu", quantize="q8_0")
    for device, text in (("cpu", r"weight: quantize: .* finite in float16"),
                         ("simulator", "finite in float16, got others in weight")):  # fmt: skip
        layer, weight = Linear(64, 3, bias=False), np.full((3, 64), np.inf, np.float32)
        with pytest.raises(WeightsError, match=text):
            layer.load_parameters({"weight": weight}, device=device, quantize="q8_0")
        assert not [*layer.named_parameters()]


def test_dtypes_of_quantised_files() -> None:
    """Activations are bf16 on CUDA; norms, which files have in f32, decide nothing."""
    norm, matrix = (GGUFTensor("t", KINDS[k], s, None, 0) for k, s in ((0, (8,)), (1, (4, 8))))  # type: ignore[arg-type]
    packed = GGUFTensor("t", KINDS[8], (4, 32), None, 0)  # type: ignore[arg-type]
    tensors = {"a": norm, "b": matrix, "c": packed}
    cuda = SimpleNamespace(caps=Caps("ptx"))
    webgpu = SimpleNamespace(caps=Caps("wgsl"))
    assert _dtypes("auto", tensors, cuda) == (ct.f16, ct.bf16)  # type: ignore[arg-type]
    assert _dtypes("auto", tensors, webgpu) == (ct.f16, ct.f32)  # type: ignore[arg-type]
    assert _dtypes("auto", {"a": norm, "b": matrix}, cuda) == (ct.f16, ct.f16)  # type: ignore[arg-type]
    wide = GGUFTensor("t", KINDS[0], (4, 8), None, 0)  # type: ignore[arg-type]
    assert _dtypes("auto", {"b": matrix, "c": wide}, cuda) == (ct.f32, ct.f32)  # type: ignore[arg-type]
    routed = {"b": matrix, "model.layers.0.mlp.gate.weight": wide}
    assert _dtypes("auto", routed, cuda) == (ct.f16, ct.f16)  # type: ignore[arg-type]


@pytest.mark.devices("cpu", "webgpu")
@pytest.mark.parametrize(("kind", "dtype"), [("BF16", ct.bf16), ("F16", ct.f16)])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_16_bit_files_stay_16_bit(
    device: ct.Device, family: str, kind: str, dtype: ct.DType, tmp_path: Path
) -> None:
    """Norms and routers, which files have in f32, do not widen the matrices."""
    file = tmp_path / "model.gguf"
    write(FOLDER / family, file, kind)
    model = load(file, device).model
    stored = ct.f32 if device.caps.target == "numpy" else dtype
    for name, tensor in model.named_parameters():
        norm = tensor.ndim == 1 or ".norms." in name
        assert tensor.dtype is (ct.f32 if norm else stored), name
    cuda = SimpleNamespace(caps=Caps("ptx"))
    tensors = tensors_of(open_gguf(file), model.config.head_dim)
    assert _dtypes("auto", tensors, cuda) == (dtype, dtype)  # type: ignore[arg-type]
    ids = np.load(FOLDER / family / "expected.npz")["ids"]
    wanted = load(file, "cpu", "f32")(ct.asarray(ids, device="cpu")).numpy()
    got = load(file, device)(ct.asarray(ids, device=device)).numpy()
    np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=0)


def test_a_quantised_norm_is_loaded_as_floats() -> None:
    class Raw(GGUFTensor, frozen=True, eq=False):
        @property
        def blocks(self) -> Any:
            return np.full((1, 2, 34), 1, np.uint8)

    norm = RMSNorm(64)
    tensor = Raw("weight", KINDS[8], (64,), None, 0)  # type: ignore[arg-type]
    norm.load_parameters({"weight": tensor}, device="cpu")
    factor = np.array([257], np.uint16).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(norm.weight.numpy(), np.repeat(factor, 64))


def with_tokenizer(tmp_path: Path, folder: Path = FOLDER / "qwen3", **more: Any) -> Path:
    """The file of a checkpoint with the tokenizer that its folder has."""
    native = json.loads((folder / "tokenizer.json").read_text())
    special = {t["content"] for t in native["added_tokens"]}
    vocab = native["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    values: dict[str, Any] = {
        "tokenizer_model": "gpt2", "tokenizer_pre": "default", "token_list": tokens,
        "token_types": [3 if t in special else 1 for t in tokens],
        "token_merges": [" ".join(m) for m in native["model"]["merges"]],
        "eos_token_id": tokens.index("<|im_end|>"), "bos_token_id": tokens.index("<|endoftext|>"),
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }  # fmt: skip
    file = tmp_path / "with_tokenizer.gguf"
    write(folder, file, **{**values, **more})
    return file


def test_the_tokenizer_of_a_file(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    model, folder = load(with_tokenizer(tmp_path), "cpu"), load(FOLDER / "qwen3", "cpu")
    assert model.tokenizer.encode(TEXTS) == folder.tokenizer.encode(TEXTS)
    for text in TEXTS[1:]:
        assert model.tokenizer.decode(model.tokenizer.encode([text])[0]) == folder.tokenizer.decode(
            folder.tokenizer.encode([text])[0]
        )
    assert model.config.stop_ids == {0, 2}  # <|endoftext|> too, which the file does not name
    shown = model.tokenizer.decode(
        model.encode_chat([{"content": "hi"}]), skip_special_tokens=False
    )
    assert shown == "<|endoftext|>hi"
    generation = model.generate("Hello", max_new_tokens=5)
    assert generation == folder.generate("Hello", max_new_tokens=5)


def test_a_file_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(FOLDER / "qwen3", file)
    model = load(file, "cpu")
    text = "expected a tokenizer, got a file without tokenizer.ggml.tokens; give ids in place of"
    with pytest.raises(WeightsError, match=re.escape(f"model.gguf: {text}")):
        model.generate("Hello")
    assert len(model.generate([3, 4], max_new_tokens=2, ignore_eos=True).ids) == 2


def test_a_first_token_where_the_file_asks_for_it(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    model = load(with_tokenizer(tmp_path, add_bos_token=True), "cpu")
    assert model.tokenizer.encode(["Hello"])[0][0] == 0


def test_sentencepiece_with_scores(tmp_path: Path) -> None:
    """Merges by score, bytes for what is not there, a space before the text."""
    pytest.importorskip("tokenizers")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "ab",
              "▁ab", "c", "bc", "abc"]  # fmt: skip
    scores = [0.0] * 259 + [-9.0, -8.0, -7.0, -1.0, -0.5, -6.0, -3.0, -2.0]
    tokens += [f"<unused{i}>" for i in range(320 - len(tokens))]
    scores += [-99.0] * (320 - len(scores))
    kinds = [2, 3, 3] + [6] * 256 + [1] * 61
    file = with_tokenizer(
        tmp_path, tokenizer_model="llama", token_list=tokens, token_scores=scores,
        token_types=kinds, token_merges=None, bos_token_id=1, eos_token_id=2, unk_token_id=0,
    )  # fmt: skip
    encode = load(file, "cpu").tokenizer
    (ids,) = encode.encode(["abc é"])
    # "▁abc": a+b (-1) before b+c (-3); then ▁+ab (-0.5), and c is left.
    assert [tokens[i] for i in ids] == ["<s>", "▁ab", "c", "▁", "<0xC3>", "<0xA9>"]
    assert encode.decode(ids) == "abc é"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokenizer_model": "t5"}, "tokenizer.ggml.model: expected gpt2, llama, bert, got 't5'"),
        ({"tokenizer_pre": "new"}, "tokenizer.ggml.pre: expected default"),
        ({"token_merges": ["ab"]}, "tokenizer.ggml.merges: expected pairs"),
        ({"token_merges": ["never there"]}, "expected a tokenizer, got"),
        ({"token_types": [1]}, "tokenizer.ggml.token_type: expected 320"),
        ({"eos_token_id": 400}, "eos_token_id: expected an id below 320, got 400"),
        ({"token_list": ["a"] * 900}, "tokenizer.ggml.tokens: expected up to 320"),
    ],
)
def test_tokenizers_that_cannot_be(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(WeightsError, match=message):
        load(with_tokenizer(tmp_path, **values), "cpu")


# -- hostile files --------------------------------------------------------------------------------


def header(tensors: int = 0, values: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


ARRAY = text("a") + struct.pack("<I", 9)
TENSOR = text("t") + struct.pack("<IQQ", 2, 4, 3)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "expected a GGUF file, got an empty one"),
        (b"GGUL" + bytes(40), "which begins with"),
        (header(version=1), "version: expected 2 or 3"),
        (header(version=3 << 24), "version: expected 2 or 3"),
        (header(tensors=2**63), "tensors: expected as many as fit"),
        (header(values=2**40), "values: expected as many as fit"),
        (header(values=1) + struct.pack("<Q", 2**62) + bytes(30), "a string's bytes"),
        (header(values=1) + text("a") + struct.pack("<I", 77) + bytes(9), "expected a type of"),
        (header(values=1) + ARRAY + struct.pack("<IQ", 4, 2**60), "numbers: expected as many"),
        (header(values=1) + ARRAY + struct.pack("<IQ", 8, 2**60), "strings: expected as many"),
        (header(values=1) + ARRAY + struct.pack("<IQ", 9, 1) + bytes(20), "array of numbers or"),
        (header(values=2) + 2 * (text("a") + struct.pack("<Ib", 1, 3)) + bytes(9), "got it twice"),
        (header(tensors=1) + text("t") + struct.pack("<I", 99) + bytes(30), "up to 4 extents"),
        (header(tensors=1) + TENSOR + struct.pack("<IQ", 99, 0), "type: expected F32"),
        (header(tensors=1) + TENSOR + struct.pack("<IQ", 8, 0), "whole blocks of 32"),
        (header(tensors=1) + TENSOR + struct.pack("<IQ", 0, 0), "truncated: expected 48 bytes"),
        (header(tensors=1) + TENSOR + struct.pack("<IQ", 0, 2**62), "truncated: expected 48"),
        (header(tensors=1) + text("t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), "truncated"),
        (header(values=1) + text("general.alignment") + struct.pack("<II", 4, 3), "power of two"),
    ],
)
def test_headers_that_lie(raw: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(raw)
    with pytest.raises(WeightsError, match=message):
        open_gguf(file)


def test_a_file_cut_anywhere(tmp_path: Path) -> None:
    whole = with_tokenizer(tmp_path).read_bytes()
    file = tmp_path / "cut.gguf"
    random = np.random.default_rng(0)
    for end in [*range(0, 200, 7), *random.integers(200, len(whole), 60).tolist()]:
        file.write_bytes(whole[:end])
        with pytest.raises(WeightsError):
            load(file, "cpu")


def test_bytes_changed_anywhere_are_typed_errors_or_another_model(tmp_path: Path) -> None:
    whole = bytearray(with_tokenizer(tmp_path).read_bytes())
    file, random, refused = tmp_path / "changed.gguf", np.random.default_rng(1), 0
    for _ in range(80):
        at, old = int(random.integers(0, 12_000)), bytes(whole[:12_000])
        whole[at] ^= 1 << int(random.integers(0, 8))
        file.write_bytes(whole)
        try:
            load(file, "cpu").generate([5], max_new_tokens=1)
        except ct.CentellaError:
            refused += 1
        finally:
            whole[:12_000] = old
    assert 0 < refused < 80


def test_no_such_architecture(tmp_path: Path) -> None:
    raw = header(values=1) + text("general.architecture") + struct.pack("<I", 8) + text("t5")
    file = tmp_path / "x.gguf"
    file.write_bytes(raw)
    with pytest.raises(WeightsError, match=r"general\.architecture: expected bert, llama"):
        load(file, "cpu")
    with pytest.raises(WeightsError, match="expected a GGUF file, got nothing"):
        load(tmp_path / "absent.gguf", "cpu")
