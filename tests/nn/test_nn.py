"""Modules: the parameter tree, loading by path, errors that name the tensors."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import nn
from centella.dtypes import dtype_of, narrow, widen
from centella.errors import ContractError, DTypeError, WeightsError
from centella.nn.tree import Tree
from centella.tensors.hints import OF_LAYER
from centella.tensors.tensor import Tensor

Array = np.ndarray[Any, Any]


class Block(nn.Module):
    """A stacked product, a list of layers and a norm."""

    ignored = ("head.*",)

    def __init__(self) -> None:
        self.both = nn.Linear(4, 5, stacks={"first": 2, "second": 3})
        self.layers = [nn.Linear(5, 4, bias=False), nn.Linear(4, 4)]
        self.norm = nn.LayerNorm(4)
        self.kept = "not a parameter"

    def rename(self, name: str) -> str:
        return name.removeprefix("model.")

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](self.both(x, activation="relu"))
        return self.norm(self.layers[1](y, residual=x))


SHAPES = {
    "first.weight": (2, 4), "second.weight": (3, 4), "first.bias": (2,), "second.bias": (3,),
    "layers.0.weight": (4, 5), "layers.1.weight": (4, 4), "layers.1.bias": (4,),
    "norm.weight": (4,), "norm.bias": (4,),
}  # fmt: skip
CHECKPOINT_OF_AUDIO = {
    "front.conv1.weight": (4, 3, 3), "front.conv1.bias": (4,), "front.conv2.weight": (4, 4, 3),
    "front.conv2.bias": (4,), "front.embed_positions.weight": (5, 4),
    **{f"block.self_attn.{n}.weight": (4, 4) for n in ("q_proj", "k_proj", "v_proj", "out_proj")},
    **{f"block.self_attn.{n}.bias": (4,) for n in ("q_proj", "v_proj", "out_proj")},
    "block.fc1.weight": (8, 4), "block.fc1.bias": (8,), "block.fc2.weight": (4, 8),
    "block.fc2.bias": (4,),
    **{f"block.self_attn_layer_norm.{n}": (4,) for n in ("weight", "bias")},
    **{f"block.final_layer_norm.{n}": (4,) for n in ("weight", "bias")},
}  # fmt: skip
PATHS = [
    "both.weight", "both.bias", "layers.0.weight", "layers.1.weight", "layers.1.bias",
    "norm.weight", "norm.bias",
]  # fmt: skip


def tensors() -> dict[str, Array]:
    rng = np.random.default_rng(7)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}


def test_parameters_by_path(device: ct.Device) -> None:
    block, given = Block(), tensors()
    assert list(block.named_parameters()) == []
    with ct.ledger() as led:
        block.load_parameters(given, device=device)
    led.expect(uploads=1, downloads=0)  # all are small: one packed write, before anything runs
    loaded = dict(block.named_parameters())
    assert list(loaded) == PATHS
    once = sum(a.nbytes for a in given.values())
    assert once <= led.upload_bytes <= once + 256 * len(PATHS)
    assert block.device is device
    stacked = np.concatenate([given["first.weight"], given["second.weight"]])
    np.testing.assert_array_equal(loaded["both.weight"].numpy(), stacked)
    np.testing.assert_array_equal(loaded["norm.bias"].numpy(), given["norm.bias"])


class InAFile:
    """A tensor as a checkpoint has it: nobody writes its bytes."""

    def __init__(self, array: Array, dtype: ct.DType = ct.f32) -> None:
        self.array, self.dtype, self.shape = array, dtype, array.shape


@pytest.mark.devices("cpu")
def test_a_checkpoint_stays_where_it_is_on_the_cpu(device: ct.Device) -> None:
    data = np.arange(30_000, dtype=np.float32).reshape(100, 300)
    bias = np.zeros(100, np.float32)
    there, copied = nn.Linear(300, 100), nn.Linear(300, 100)
    with ct.ledger() as led:
        there.load_parameters({"weight": InAFile(data), "bias": InAFile(bias)}, device=device)
    led.expect(uploads=1)  # of the bias, which is small
    assert np.shares_memory(there.weight.native[0], data)
    copied.load_parameters({"weight": data, "bias": bias}, device=device)
    assert not np.shares_memory(copied.weight.native[0], data)
    narrow = nn.Linear(300, 100)
    narrow.load_parameters(
        {"weight": InAFile(data), "bias": InAFile(bias)}, device=device, dtype="f16"
    )
    assert narrow.weight.dtype is ct.f16
    x = np.ones((2, 300), np.float32)
    y = there(ct.asarray(x, device=device)).numpy()
    np.testing.assert_allclose(y, x @ data.T, rtol=1e-6)
    again = there.weight + 1.0  # its memory is nobody's to reuse
    np.testing.assert_array_equal(again.numpy(), data + 1)
    del there, again
    np.testing.assert_array_equal(copied.weight.numpy(), data)


def test_a_large_tensor_is_an_upload_of_its_own(device: ct.Device) -> None:
    block = nn.Linear(300, 100)
    given = {"weight": np.zeros((100, 300), np.float32), "bias": np.ones(100, np.float32)}
    with ct.ledger() as led:
        block.load_parameters(given, device=device)
    led.expect(uploads=2)
    with ct.ledger() as led:
        y = block(ct.zeros((2, 300), device=device)).numpy()
    led.expect(uploads=0)
    np.testing.assert_array_equal(y, np.ones((2, 100), np.float32))


def test_a_module_without_forward_says_what_it_lacks() -> None:
    class Half(nn.Module):
        pass

    with pytest.raises(NotImplementedError, match=r"^Half: expected a method forward\(...\)"):
        Half()(ct.zeros(1, device="cpu"))


def test_forward(device: ct.Device) -> None:
    block, given = Block(), tensors()
    block.load_parameters(given, device=device)
    x = np.random.default_rng(8).standard_normal((3, 4)).astype(np.float32)
    w = {n: a.astype(np.float64) for n, a in given.items()}
    y = np.concatenate([x @ w[f"{n}.weight"].T + w[f"{n}.bias"] for n in ("first", "second")], 1)
    y = np.maximum(y, 0) @ w["layers.0.weight"].T @ w["layers.1.weight"].T + w["layers.1.bias"] + x
    y = (y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + 1e-5)
    expected = y * w["norm.weight"] + w["norm.bias"]
    np.testing.assert_allclose(block(ct.asarray(x, device=device)).numpy(), expected, atol=2e-6)


@pytest.mark.parametrize("m", [1, 3, 17])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_weights_of_a_narrow_checkpoint_with_wide_activations(
    device: ct.Device, kind: str, m: int
) -> None:
    rng, dtype = np.random.default_rng(9), dtype_of(kind)
    shapes = {"weight": (37, 75), "bias": (37,)}
    wide = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    layer = nn.Linear(75, 37)
    layer.load_parameters(wide, device=device, dtype=kind)
    assert {t.dtype for _, t in layer.named_parameters()} == {dtype}
    w = {n: widen(narrow(a, dtype), dtype).astype(np.float64) for n, a in wide.items()}
    x, residual = (rng.standard_normal((m, n)).astype(np.float32) for n in (75, 37))
    y = layer(ct.asarray(x, device=device), "relu", ct.asarray(residual, device=device))
    assert y.dtype is ct.f32
    expected = np.maximum(x @ w["weight"].T + w["bias"], 0) + residual
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=2e-5)


def test_embedding(device: ct.Device) -> None:
    table = nn.Embedding(3, 4)
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    table.load_parameters({"weight": weight}, device=device)
    ids = ct.asarray(np.array([[2, 0]], np.int32), device=device)
    np.testing.assert_array_equal(table(ids).numpy(), weight[[2, 0]][None])


def test_modules_by_path() -> None:
    outer = nn.Module()
    outer.block = Block()  # type: ignore[attr-defined]
    modules = dict(outer.named_modules())
    names = ["", "block", *(f"block.{n}" for n in ("both", "layers.0", "layers.1", "norm"))]
    assert list(modules) == names
    assert modules[""] is outer and modules["block.layers.1"] is outer.block.layers[1]  # type: ignore[attr-defined]
    assert dict(Block().named_modules())["norm"].__class__ is nn.LayerNorm


class Heads(nn.Module):
    """Modules in every kind of container."""

    def __init__(self) -> None:
        self.heads = {"name": nn.Linear(4, 2, bias=False), "place": nn.LayerNorm(4)}
        self.pair = (nn.RMSNorm(4), nn.RMSNorm(4))
        self.deep = [[nn.Linear(2, 2)], {"a": (nn.Embedding(3, 2),)}]
        self.sizes = {"name": 2}
        self.empty: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["name"](self.pair[0](x))


HEADS = {
    "heads.name.weight": (2, 4), "heads.place.weight": (4,), "heads.place.bias": (4,),
    "pair.0.weight": (4,), "pair.1.weight": (4,), "deep.0.0.weight": (2, 2), "deep.0.0.bias": (2,),
    "deep.1.a.0.weight": (3, 2),
}  # fmt: skip


def test_modules_in_lists_tuples_and_dicts(device: ct.Device) -> None:
    module = Heads()
    paths = dict.fromkeys(name.rpartition(".")[0] for name in HEADS)
    assert [name for name, _ in module.named_modules()] == ["", *paths]
    given = {n: np.full(s, i, np.float32) for i, (n, s) in enumerate(HEADS.items())}
    module.load_parameters(given, device=device)
    state = module.state_dict()
    assert {n: t.shape for n, t in state.items()} == HEADS
    for name, tensor in state.items():
        np.testing.assert_array_equal(tensor.numpy(), given[name])
    x = np.ones((1, 4), np.float32)
    got = module(ct.asarray(x, device=device)).numpy()
    np.testing.assert_allclose(got, (3 * x) @ given["heads.name.weight"].T, rtol=1e-5)


def test_a_tree_follows_tuples_and_dicts() -> None:
    module: Any = Heads()
    tree = Tree(module)
    assert not tree.changed
    for owner in (module.heads["name"], module.pair[1], module.deep[1]["a"][0]):
        owner.weight = nn.parameter(1)
        assert tree.changed
        tree = Tree(module)
    module.heads["third"] = nn.RMSNorm(1)
    assert tree.changed


def test_state_dict_is_what_load_parameters_takes(device: ct.Device) -> None:
    """Stacked products included; on the same device the tensors themselves are shared."""
    first, again, narrow = Block(), Block(), Block()
    with pytest.raises(ContractError, match=r"^state_dict: no data yet: both\.weight, .*load_para"):
        first.state_dict()
    first.load_parameters(tensors(), device=device)
    state = first.state_dict()
    assert list(state) == PATHS
    again.load_parameters(state, device=device)
    assert all(t is state[n] for n, t in again.named_parameters())
    x = ct.asarray(np.ones((2, 4), np.float32), device=device)
    np.testing.assert_array_equal(again(x).numpy(), first(x).numpy())
    narrow.load_parameters(state, device="cpu", dtype="bf16", vector_dtype="f32")
    for name, tensor in narrow.state_dict().items():
        assert (tensor.device.name, tensor.dtype.name) == ("cpu", ["bf16", "f32"][tensor.ndim == 1])
        np.testing.assert_allclose(tensor.numpy(), state[name].numpy(), rtol=2.0**-8)


class Audio(nn.Module):
    """Parameters whose form in a checkpoint is another: stacked, turned, named as a layer."""

    def __init__(self) -> None:
        self.front = nn.ConvFrontend(3, 4, 5)
        self.block = nn.EncoderBlock(4, 2, 8, unbiased=("k_proj",))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.front(x))


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_arrays_of_a_state_dict_are_loaded(device: ct.Device, kind: str) -> None:
    rng = np.random.default_rng(3)
    first, again = Audio(), Audio()
    of_file = {n: rng.standard_normal(s).astype(np.float32) for n, s in CHECKPOINT_OF_AUDIO.items()}
    first.load_parameters(of_file, device=device, dtype=kind)
    saved = {n: t.numpy() for n, t in first.state_dict().items()}
    again.load_parameters(saved, device=device, dtype=kind)
    for (name, tensor), (_, other) in zip(
        first.named_parameters(), again.named_parameters(), strict=True
    ):
        assert tensor.dtype is other.dtype
        np.testing.assert_array_equal(tensor.numpy(), other.numpy(), err_msg=name)
    assert not np.any(saved["block.self_attn.qkv.bias"][4:8])


def test_tensors_by_the_names_of_a_checkpoint() -> None:
    """Stacked as arrays are, also where the parts are on a device."""
    first, again, given = Block(), Block(), tensors()
    first.load_parameters(given, device="cpu")
    there: dict[str, Any] = {n: ct.asarray(a, device="cpu") for n, a in given.items()}
    again.load_parameters(there, device="cpu")
    for name, tensor in again.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), first.state_dict()[name].numpy())


def test_a_state_dict_that_does_not_fit() -> None:
    block = Block()
    block.load_parameters(tensors(), device="cpu")
    state: dict[str, Any] = block.state_dict()
    bias = state["norm.bias"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({**state, "norm.bias": bias[:2]}, r"norm\.bias: expected shape \[4\], got \[2"),
        ({**state, "norm.bias": bias.astype("i32")}, "expected f32, f16 or bf16, got"),
        ({**state, "more": bias}, "missing: none; left over: more$"),
        ({n: t for n, t in state.items() if t is not bias}, r"missing: norm\.bias; left over: no"),
    ]
    for given, text in cases:
        with pytest.raises(WeightsError, match=text):
            Block().load_parameters(given, device="cpu")
    with pytest.raises(
        WeightsError, match=r"already loaded \(make the module anew\): both\.weight"
    ):
        block.load_parameters(state, device="cpu")


def test_a_module_is_printed_as_a_tree() -> None:
    block = Block()
    block.load_parameters({n: a.astype(np.float16) for n, a in tensors().items()}, device="cpu")
    assert (
        repr(block)
        == """\
Block(
  (both): Linear(weight [5, 4] f16, bias [5] f16)
  (layers.0): Linear(weight [4, 5] f16)
  (layers.1): Linear(weight [4, 4] f16, bias [4] f16)
  (norm): LayerNorm(weight [4] f16, bias [4] f16)
)"""
    )
    outer: Any = nn.Module()
    outer.scale = nn.parameter(3)
    outer.layers = [nn.RMSNorm(2), nn.RMSNorm(2), nn.RMSNorm(2), nn.RMSNorm(3)]
    outer.named = {"a": nn.RMSNorm(2), "b": nn.RMSNorm(2)}
    assert (
        repr(outer)
        == """\
Module(
  scale [3] without data
  (layers.0-2): 3 x RMSNorm(weight [2] without data)
  (layers.3): RMSNorm(weight [3] without data)
  (named.a): RMSNorm(weight [2] without data)
  (named.b): RMSNorm(weight [2] without data)
)"""
    )
    assert repr(nn.Module()) == "Module()"


def test_names_that_modules_of_torch_have() -> None:
    layer: Any = nn.Linear(2, 3)
    for name, hint in OF_LAYER.items():
        with pytest.raises(AttributeError) as raised:
            getattr(layer, name)
        assert str(raised.value) == f"'Linear' object has no attribute {name!r}: {hint}"
        for ours in re.findall(r"module\.(\w+)", hint):
            assert hasattr(layer, ours), hint
    with pytest.raises(AttributeError, match=r"^'Linear' object has no attribute 'wieght'$"):
        layer.wieght  # noqa: B018
    assert copy.deepcopy(layer).weight.shape == (3, 2)


def test_names_that_mean_a_path_and_names_that_are_ignored() -> None:
    block = Block()
    renamed = {f"model.{n}": t for n, t in tensors().items()}
    block.load_parameters({**renamed, "head.weight": np.zeros((9, 9), np.float32)}, device="cpu")
    assert [name for name, _ in block.named_parameters()] == PATHS


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_dtype_of_matrices_and_of_vectors(kind: str) -> None:
    block, given = Block(), tensors()
    block.load_parameters(given, device="cpu", dtype=kind, vector_dtype="f32")
    for path, tensor in block.named_parameters():
        assert tensor.dtype.name == ("f32" if tensor.ndim == 1 else kind), path
    bound = 2.0**-8 if kind == "bf16" else 2.0**-11
    got = dict(block.named_parameters())["layers.1.weight"].numpy().astype(np.float32)
    np.testing.assert_allclose(got, given["layers.1.weight"], rtol=bound, atol=1e-7)


def test_dtype_of_the_checkpoint_is_kept() -> None:
    block = Block()
    halves = {n: t.astype(np.float16) for n, t in tensors().items()}
    block.load_parameters(halves, device="cpu")
    assert {t.dtype for _, t in block.named_parameters()} == {ct.f16}


def test_missing_and_extra_tensors_are_named() -> None:
    given = tensors()
    given["extra.weight"] = given.pop("second.bias")
    del given["norm.bias"]
    text = "folder: missing: second.bias, norm.bias; left over: extra.weight"
    block = Block()
    with pytest.raises(WeightsError, match=f"^{re.escape(text)}$"):
        block.load_parameters(given, device="cpu", origin="folder")
    assert list(block.named_parameters()) == []


def test_a_second_load_is_refused() -> None:
    block, given = Block(), tensors()
    block.load_parameters(given, device="cpu")
    before = [t for _, t in block.named_parameters()]
    text = "missing: none; left over: none; already loaded (make the module anew): "
    with pytest.raises(WeightsError, match=re.escape(text + ", ".join(given))):
        block.load_parameters(given, device="cpu")
    assert all(t is b for (_, t), b in zip(block.named_parameters(), before, strict=True))


def test_long_lists_are_cut() -> None:
    given = {**tensors(), **{f"extra.{i}": np.zeros(1, np.float32) for i in range(30)}}
    with pytest.raises(WeightsError, match=r"missing: none; left over: .*extra\.19 and 10 more$"):
        Block().load_parameters(given, device="cpu")


def test_parameters_are_floats_on_the_device() -> None:
    block = Block()
    for kind in ("i8", "i32", "bool"):
        with pytest.raises(DTypeError, match=f"expected f32, f16 or bf16, got {kind}"):
            block.load_parameters(tensors(), device="cpu", dtype=kind)
    assert list(block.named_parameters()) == []


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("second.weight", np.zeros((2, 4), np.float32), WeightsError,
         r"tensor second\.weight: expected shape \[3, 4\], got \[2, 4\]"),
        ("norm.bias", np.zeros(4, np.int32), WeightsError, r"norm\.bias: .*bf16, got i32"),
        ("norm.bias", np.zeros(4), DTypeError, "float64 has no storage type"),
        ("model.norm.bias", np.zeros(4, np.float32), WeightsError, "both stand for norm.bias"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(name: str, value: Array, error: type, text: str) -> None:
    block = Block()
    with pytest.raises(error, match=text), ct.ledger() as led:
        block.load_parameters({**tensors(), name: value}, device="cpu")
    assert (led.uploads, list(block.named_parameters())) == (0, [])


def test_a_module_without_data_says_so() -> None:
    block = Block()
    with pytest.raises(ContractError, match="no parameter has data yet"):
        _ = block.device
    with pytest.raises(ContractError, match=r"shape \[5, 4\] has no data yet: call load_param"):
        block(ct.asarray(np.zeros((1, 4), np.float32), device="cpu"))


def test_a_parameter_without_data_is_named_by_its_path() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            self.blocks = [Block(), Block()]

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](x)

    twice = Twice()
    text = r"^Twice: parameter blocks\.1\.both\.weight of shape \[5, 4\] has no data yet"
    with pytest.raises(ContractError, match=text) as caught:
        twice(ct.asarray(np.zeros((1, 4), np.float32), device="cpu"))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# -- the page -------------------------------------------------------------------------------------


CLASSES = [n for n in nn.__all__ if inspect.isclass(getattr(nn, n)) and n != "Module"]


@pytest.mark.parametrize("name", [n for n in CLASSES if issubclass(getattr(nn, n), nn.Module)])
def test_the_page_has_every_module_with_its_arguments(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "nn.md").read_text(encoding="utf-8")
    parameters = list(inspect.signature(getattr(nn, name)).parameters.values())
    if name == "Linear":  # two are for layers that put a checkpoint's together
        parameters = [p for p in parameters if p.name not in ("stacks", "unbiased")]
    plain = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
    said = plain.replace("'", '"').replace("1e-05", "1e-5").replace("1e-06", "1e-6")
    assert f"`{name}({said})`" in page


def test_modules_come_with_the_package() -> None:
    assert ct.nn is nn
