"""Names of other libraries are answered with ours; operators that they have are there."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.lang import hints as lang_hints
from centella.tensors import hints
from centella.tensors.arguments import refuse_names

X = np.array([[1.5, -2.0, 0.25], [-0.5, 3.0, 1.0]], np.float32)


@pytest.mark.parametrize("name", hints.OF_MODULE)
def test_names_of_a_module(name: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(ct, name)
    said = f"module 'centella' has no attribute {name!r}: {hints.OF_MODULE[name]}"
    assert str(raised.value) == said


@pytest.mark.parametrize("name", [*hints.OF_TENSOR, "add_"])
def test_names_of_a_tensor(name: str) -> None:
    x: Any = ct.asarray(X, device="cpu")
    with pytest.raises(AttributeError, match=f"'Tensor' object has no attribute '{name}': ."):
        getattr(x, name)


@pytest.mark.parametrize("name", lang_hints.NAMES)
def test_names_of_the_kernel_language(name: str) -> None:
    hint = lang_hints.NAMES[name]
    with pytest.raises(AttributeError) as raised:
        getattr(ct.lang, name)
    assert str(raised.value) == f"module 'centella.lang' has no attribute {name!r}: {hint}"
    assert all(hasattr(ct.lang, ours) for ours in re.findall(r"\blang\.(\w+)", hint))


def test_what_hints_name_is_there() -> None:
    x = ct.asarray(X, device="cpu")
    for text in (*hints.OF_MODULE.values(), *hints.OF_TENSOR.values(), *hints._REDUCED.values()):
        for name in re.findall(r"\bct\.(\w+)", text):
            assert hasattr(ct, name), text
        for name in re.findall(r"\bx\.(\w+)", text):
            assert hasattr(x, name), text
    for name in hints.FUNCTIONS:
        first = next(iter(inspect.signature(getattr(ct, name)).parameters))
        assert first in ("x", "a", "condition"), name


def test_names_of_an_index_and_of_matches() -> None:
    index: Any = ct.Index(X, device="cpu")
    matches: Any = index.search(X[0], k=1)
    for thing, known in ((index, hints.OF_INDEX), (matches, hints.OF_MATCHES)):
        kind = type(thing).__name__
        for name, hint in known.items():
            with pytest.raises(AttributeError) as raised:
                getattr(thing, name)
            assert str(raised.value) == f"{kind!r} object has no attribute {name!r}: {hint}"
            for said, owner in (("index", index), ("matches", matches)):
                assert all(hasattr(owner, o) for o in re.findall(rf"\b{said}\.(\w+)", hint)), hint
    with pytest.raises(AttributeError, match=r"^'Index' object has no attribute 'nbyte'$"):
        index.nbyte  # noqa: B018
    with pytest.raises(AttributeError, match=r"^'Matches' object has no attribute 'row'$"):
        matches.row  # noqa: B018
    with pytest.raises(
        TypeError, match=r"^Matches is no pair: write matches\.scores and matches\."
    ):
        _scores, _rows = matches


def test_names_of_requests_and_their_scheduler() -> None:
    model = ct.load("tests/data/decoders/qwen3", device="cpu", task="generate")
    with ct.Scheduler(model, background=False) as scheduler:
        request = scheduler.submit("a", max_new_tokens=1)
        things: Any = (("scheduler", scheduler, hints.OF_SCHEDULER),
                       ("request", request, hints.OF_REQUEST))  # fmt: skip
        for said, thing, known in things:
            for name, hint in known.items():
                with pytest.raises(AttributeError, match=f"{name!r}: {re.escape(hint)}$"):
                    getattr(thing, name)
                assert all(hasattr(thing, o) for o in re.findall(rf"\b{said}\.(\w+)", hint)), hint
        request.cancel()


def test_names_that_are_asked_of_a_class() -> None:
    index: Any = ct.Index
    with pytest.raises(AttributeError, match=r"type object 'Index' has no .*'load': ct\.Index\.op"):
        index.load("vectors.npy")
    embedder: Any = ct.Embedder
    with pytest.raises(AttributeError, match=r"'from_pretrained': ct\.load\(path\)$"):
        embedder.from_pretrained("minilm")
    with pytest.raises(AttributeError, match=r"^type object 'Index' has no attribute 'opem'$"):
        index.opem("vectors.npy")


def test_other_names_of_arguments_of_a_search() -> None:
    make: Any = ct.Index
    for name, hint in (("metric", "scores are dot products"), ("documents", "write texts="),
                       ("d", "the vectors say it"), ("nlist", "every vector")):  # fmt: skip
        with pytest.raises(ct.DTypeError, match=f"^Index: unknown argument {name}=; {hint}"):
            make(X, device="cpu", **{name: 3})
    index: Any = make(X, device="cpu")
    for name, hint in (("top_k", "write k="), ("n_results", "write k="), ("limit", "write k="),
                       ("filter", "every row is compared"), ("score_threshold", "choose by"),
                       ("metric", "scores are dot products"), ("kk", "")):  # fmt: skip
        with pytest.raises(ct.DTypeError, match=f"^search: unknown argument {name}=(; {hint}|$)"):
            index.search(X[0], **{name: 3})
    with pytest.raises(ct.DTypeError, match=r"^rank: unknown argument k=; write top_k=$"):
        refuse_names("rank", {"k": 3})


def test_names_that_nobody_has() -> None:
    x: Any = ct.asarray(X, device="cpu")
    with pytest.raises(AttributeError, match=r"'centella' has no attribute 'sofmax'$") as raised:
        getattr(ct, "sofmax")  # noqa: B009  # mypy knows that it is missing
    assert (raised.value.name, raised.value.obj) == ("sofmax", ct)  # Python proposes one like it
    with pytest.raises(AttributeError, match=r"^'Tensor' object has no attribute 'shap'$"):
        x.shap  # noqa: B018
    with pytest.raises(TypeError, match=r"no item assignment: .* a ct\.State changes$"):
        x[0] = 1


def test_classes_are_not_called_with_data() -> None:
    maker: Any = ct.Tensor
    for data in ([1, 2], [1], 2.0, ct.asarray(X, device="cpu")):
        with pytest.raises(ct.DTypeError, match=r"^Tensor: .*; ct\.asarray\(data\) makes one$"):
            maker(data)
    with pytest.raises(ct.DTypeError, match=r"ct\.asarray"):
        maker()
    opener: Any = ct.Device
    with pytest.raises(ct.DeviceError, match=r"^Device: .*; ct\.device\('cpu'\) opens one$"):
        opener("cpu", memory_limit=3)


REDUCTIONS: tuple[Any, ...] = (
    ct.sum, ct.mean, ct.max, ct.min, ct.argmax, ct.softmax, ct.log_softmax, ct.l2_normalize,
)  # fmt: skip


def test_other_names_of_arguments() -> None:
    x: Any = ct.asarray(X, device="cpu")
    for function in REDUCTIONS:
        name = function.__name__
        with pytest.raises(ct.DTypeError, match=rf"^{name}: unknown argument dim=; write axis=$"):
            function(x, dim=0)
        with pytest.raises(ct.DTypeError, match=rf"^{name}: unknown argument keepdim=; write keep"):
            function(x, keepdim=True)
        with pytest.raises(ct.DTypeError, match=rf"^{name}: unknown argument out=$"):
            function(x, out=x)
    indices = ct.asarray([0], device="cpu")
    joins: list[tuple[Any, tuple[Any, ...]]] = [
        (ct.concat, ([x, x],)), (ct.stack, ([x, x],)), (ct.split, (x, 1)), (ct.chunk, (x, 2)),
        (ct.gather, (x, indices)),
    ]  # fmt: skip
    for function, given in joins:
        with pytest.raises(ct.DTypeError, match=f"^{function.__name__}: .* dim=; write axis=$"):
            function(*given, dim=0)


def test_other_names_of_devices() -> None:
    for name, meant in (("mps", "webgpu"), ("gpu", "webgpu or cuda; ct.device"), ("CPU", "cpu"),
                        ("CUDA:0", "cuda"), ("vulkan", "webgpu")):  # fmt: skip
        with pytest.raises(ct.DeviceError, match=f"^unknown device '{name}'; .*; write {meant}"):
            ct.device(name)
    with pytest.raises(ct.DeviceError, match=r"or simulator$"):
        ct.device("fpga")


def test_a_shape_is_one_argument() -> None:
    for name in ("zeros", "ones", "empty"):
        maker: Any = getattr(ct, name)
        with pytest.raises(ct.DTypeError, match=rf"^{name}: expected a dtype, .* as in \(2, 3\)$"):
            maker(2, 3)
    with pytest.raises(ct.DTypeError, match=r"^zeros: expected a dtype, got 3"):
        ct.zeros(2, 3, 4)  # type: ignore[arg-type]
    with pytest.raises(ct.DTypeError, match=r"^5 is not a storage type"):
        ct.ones((2, 3), 5)


def test_other_names_of_a_launchs_size() -> None:
    @ct.kernel
    def copied(x: ct.In[ct.f32], y: ct.Out[ct.f32]) -> None:
        y[ct.lang.global_id()] = x[ct.lang.global_id()]

    x = ct.asarray(X[0], device="cpu")
    with pytest.raises(ct.TraceError, match=r"^copied: unknown \['thread'\]; write threads=$"):
        copied(x, ct.empty(3, device="cpu"), thread=3)
    with pytest.raises(ct.TraceError, match=r"^copied: unknown \['blocks'\]; write groups=$"):
        copied(x, ct.empty(3, device="cpu"), blocks=3)

    launch: Any = copied
    with pytest.raises(ct.TraceError, match=r"expected a call, as in copied\(x, y, threads=x.si"):
        launch[1, 64](x, x)
    with pytest.raises(ct.TraceError, match=r"'x' must be annotated .*; got none$"):
        ct.kernel(lambda x: None)


def test_a_device_in_the_place_of_a_dtype() -> None:
    with pytest.raises(ct.DTypeError, match=r"^'cuda:1' is not a .*; write device='cuda:1'$"):
        ct.asarray([1.0], "cuda:1")


def test_the_axis_of_a_new_dimension() -> None:
    """Each spelling of the hint is right for its axis."""
    x: Any = ct.asarray(X, device="cpu")
    with pytest.raises(AttributeError) as raised:
        x.unsqueeze(0)
    said = dict(
        (int(axis), spelling) for spelling, axis in re.findall(r"(x\[.*?\]) for axis (-?\d)",
                                                              str(raised.value))
    )  # fmt: skip
    assert set(said) == {0, 1, -1}
    for axis, spelling in said.items():
        assert eval(spelling).shape == np.expand_dims(X, axis).shape


def test_a_traced_value_is_no_tensor() -> None:
    def kernel(x: ct.In[ct.f32], y: ct.Out[ct.f32]) -> None:
        value: Any = x[0]
        y[0] = ct.exp(value)

    with pytest.raises(ct.DTypeError, match=r"exp: .* got Expr; lang\.exp takes a traced value"):
        ct.kernel(kernel).source("wgsl")


def test_numpys_functions(device: ct.Device) -> None:
    x: Any = ct.asarray(X, device=device)
    cases: list[tuple[Any, str]] = [
        (lambda: np.tanh(x), r"np\.tanh takes arrays, got a Tensor: ct\.tanh\(x\)$"),
        (lambda: np.abs(x), r"np\.absolute takes .*: ct\.abs\(x\)$"),
        (lambda: np.sum(x), r"np\.add takes .*: ct\.sum\(x\)$"),
        (lambda: np.max(x), r"np\.maximum takes .*: ct\.max\(x\)$"),
        (lambda: np.add(x, x), r"np\.add takes .*: the operator of Python, between Tensors$"),
        (lambda: np.arctan(x), r"np\.arctan takes .*: x\.numpy\(\) is one$"),
        (lambda: X.T @ x, "matmul: expected a Tensor, got ndarray; ct.asarray makes one"),
        (lambda: X + x, "add: expected a Tensor, got a NumPy array; ct.asarray makes one"),
        (lambda: np.add(X, x, out=X.copy()), r"np\.add takes arrays"),
        (lambda: x * [1], "mul: expected a Tensor, got list; ct.asarray makes one"),
        (lambda: x + ct.State(x), "add: expected a Tensor, got State; its .value is one"),
    ]
    for use, text in cases:
        with pytest.raises(ct.DTypeError, match=text):
            use()
    np.testing.assert_array_equal((np.float32(2) * x).numpy(), 2 * X)
    np.testing.assert_array_equal((np.float32(2) - x).numpy(), 2 - X)
    np.testing.assert_array_equal((np.float32(1) < x).numpy(), X > 1)


def test_a_state_is_no_operand(device: ct.Device) -> None:
    state: Any = ct.State(X, device=device)
    cases: list[Any] = [
        lambda: state + 1, lambda: 1 - state, lambda: state @ state, lambda: -state,
        lambda: state < 1, lambda: len(state), lambda: state[0], lambda: state ** 2,
        lambda: state.__setitem__(0, 1), lambda: list(state),
    ]  # fmt: skip
    for use in cases:
        with pytest.raises(ct.DTypeError, match=r"state\.value is a Tensor, state\.assign\(x\) ch"):
            use()


@pytest.mark.parametrize("n", [-3, -1, 0, 1, 2, 3, 7, 10, 2.0, np.int64(2), 0.5])
def test_powers(device: ct.Device, n: Any) -> None:
    data = np.abs(X) if n == 0.5 else X
    got = (ct.asarray(data, device=device) ** n).numpy()
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, data.astype(np.float64) ** float(n), rtol=2e-6)


def test_powers_of_integers_and_of_nothing(device: ct.Device) -> None:
    whole = ct.asarray([-3, 0, 5], device=device)
    for n in (0, 1, 2, 5):
        np.testing.assert_array_equal((whole**n).numpy(), np.array([-3, 0, 5]) ** n)
    wrong: list[Any] = [-1, 1.5, 65, "2", None, True, 2j]
    for n in wrong:
        with pytest.raises(ct.DTypeError, match=r"pow: expected an exponent of 0\.5 or a whole"):
            whole**n
    assert (ct.zeros((0, 3), device=device) ** 3).shape == (0, 3)


def test_signs_and_ones(device: ct.Device) -> None:
    x = ct.asarray(X, device=device)
    np.testing.assert_array_equal(abs(x).numpy(), np.abs(X))
    assert +x is x
    for kind in ("f32", "f16", "bf16", "i32", "u8", "bool"):
        ones = ct.ones((2, 3), kind, device)
        assert ones.dtype == kind
        np.testing.assert_array_equal(ones.numpy(), np.ones((2, 3)))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_stays_in_its_process(copied: Callable[[Any], Any]) -> None:
    embedder = ct.load("tests/data/tiny-bert", device="cpu", task="embed")
    model = ct.load("tests/data/decoders/qwen3", device="cpu", task="generate")
    things: list[tuple[Any, str]] = [
        (embedder, r"call ct\.load"),
        (model, r"call ct\.load"),
        (ct.load("tests/data/encoders/bert-tags", device="cpu"), r"call ct\.load"),
        (ct.load("tests/data/whisper/tiny", device="cpu"), r"call ct\.load"),
        (ct.Index(X, device="cpu"), r"ct\.Index\(vectors\) makes one"),
        (model.stream("a", max_new_tokens=1), r"stream\.result may leave it"),
    ]
    for thing, text in things:
        said = rf"^{type(thing).__name__}: expected to stay in its process, got a copy .*; {text}"
        with pytest.raises(TypeError, match=said):
            copied(thing)


def test_other_names_of_arguments_of_load() -> None:
    for name, hint in (("compute_type", "write dtype="), ("n_gpu_layers", "a whole model is on"),
                       ("revision", "huggingface_hub.snapshot"), ("n_ctx", "memory grows"),
                       ("providers", "write device="), ("download_root", "HF_HOME")):  # fmt: skip
        with pytest.raises(ct.DTypeError, match=f"^load: unknown argument {name}=; {hint}"):
            refuse_names("load", {name: 1})
