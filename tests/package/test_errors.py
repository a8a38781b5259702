"""The exception tree: what derives from what, what texts carry, where foreign errors end."""

from __future__ import annotations

import builtins
import copy
import inspect
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import errors, nn
from tests.support.foreign import foreign

TREE = {
    "ShapeError": (ct.CentellaError, ValueError),
    "DTypeError": (ct.CentellaError, TypeError),
    "TraceError": (ct.CentellaError,),
    "DeviceError": (ct.CentellaError, RuntimeError),
    "DeviceLostError": (ct.DeviceError,),
    "CompileError": (ct.CentellaError,),
    "LimitError": (ct.CentellaError,),
    "OutOfMemoryError": (ct.CentellaError, MemoryError),
    "TransferForbidden": (ct.CentellaError,),
    "ContractError": (ct.CentellaError,),
    "DiscardedError": (ct.ContractError,),
    "KVCacheFullError": (ct.CentellaError,),
    "WeightsError": (ct.CentellaError, ValueError),
    "AudioError": (ct.CentellaError,),
    "SimulationError": (ct.CentellaError,),
    "MissingExtraError": (ct.CentellaError, ImportError),
}
MADE: dict[str, tuple[Any, ...]] = {
    "CompileError": ("gelu", "a\nb", "line 2: no"),
    "MissingExtraError": ("tokenizers", "models"),
}


def every() -> list[type[ct.CentellaError]]:
    return [c for _, c in inspect.getmembers(errors, inspect.isclass)
            if issubclass(c, ct.CentellaError) and c is not ct.CentellaError]  # fmt: skip


def test_the_tree_is_whole() -> None:
    assert {c.__name__ for c in every()} == set(TREE)
    for name, bases in TREE.items():
        assert getattr(ct, name).__bases__ == bases, name


def test_the_docstring_draws_the_tree() -> None:
    drawn = errors.__doc__ or ""
    for name, bases in TREE.items():
        own = [b.__name__ for b in bases if b.__module__ == "builtins"]
        line = f"{name}({own[0]})" if own else name
        assert re.search(rf"─ {re.escape(line)}\s", drawn), line


@pytest.mark.parametrize("kind", every(), ids=lambda c: c.__name__)
def test_an_error_is_caught_by_each_of_its_bases(kind: type[ct.CentellaError]) -> None:
    error = kind(*MADE.get(kind.__name__, ("what happened",)))
    for base in kind.__mro__[1:-1]:
        with pytest.raises(base):
            raise error
    assert str(error)
    assert isinstance(error, ct.CentellaError)
    assert not hasattr(builtins, kind.__name__)


@pytest.mark.parametrize("kind", every(), ids=lambda c: c.__name__)
def test_an_error_travels_between_processes(kind: type[ct.CentellaError]) -> None:
    error = kind(*MADE.get(kind.__name__, ("what happened",)))
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == str(error)
        assert again.__dict__ == error.__dict__


def test_a_compile_error_shows_numbered_source_and_the_log() -> None:
    source = "\n".join(f"line {i}" for i in range(1, 13))
    error = ct.CompileError("gelu", source, "error: line 7 is bad\n")
    assert (error.name, error.source, error.log) == ("gelu", source, "error: line 7 is bad\n")
    text = str(error)
    assert text.startswith("kernel 'gelu' did not compile:\nerror: line 7 is bad\n\n")
    assert " 7 | line 7\n" in text
    assert "12 | line 12" in text


def test_a_missing_extra_has_the_line_to_type() -> None:
    error = ct.MissingExtraError("tokenizers", "models")
    assert (error.package, error.extra) == ("tokenizers", "models")
    wanted = "'tokenizers' is not installed; install it with: pip install 'centella[models]'"
    assert str(error) == wanted


@pytest.mark.devices("webgpu")
def test_source_that_a_driver_refuses(device: ct.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real compile failure: the text has the op, the line, the driver's log and the source."""
    from centella.emit.program import Program

    own = ct.device("webgpu", pool="reuse")
    raw = own.backend.compile

    def broken(program: Any) -> Any:
        text = program.source.replace("fn main", "let nonsense;\nfn main")
        return raw(Program(program.key + "x", program.target, program.name, text, program.ir))

    x = ct.asarray(np.ones(8, np.float32), device=own)
    y = ct.tanh(x)
    with monkeypatch.context() as patch:
        patch.setattr(own.backend, "compile", broken)
        with pytest.raises(ct.CompileError) as raised:
            y.numpy()
    text = str(raised.value)
    assert text.startswith("tanh (recorded at ")
    assert "test_errors.py" in text
    assert "kernel 'tanh' did not compile:" in text
    assert "| let nonsense;" in text
    assert raised.value.__cause__ is not None
    np.testing.assert_allclose(y.numpy(), np.tanh(np.ones(8)), rtol=1e-6)


X = np.ones((3, 4), np.float32)
NONE: Any = None
ARRAY: Any = X
MISTAKES: list[tuple[str, Any, type[Exception], str]] = [
    ("add", lambda x: x + x[:2, :3], ct.ShapeError, r"add: expected shapes that broadcast, got"),
    ("matmul", lambda x: x @ x, ct.ShapeError, r"matmul: .*\[3, 4\]"),
    ("mixed", lambda x: x + x.astype("i32"), ct.DTypeError, "add: cannot mix f32 and i32; cast"),
    ("string", lambda x: x + "a", ct.DTypeError, "add: expected a Tensor or a Python number.*'a'"),
    ("fraction", lambda x: x.astype("i32") + 0.5, ct.DTypeError, "that fits i32, got 0.5"),
    ("array", lambda x: ct.relu(ARRAY), ct.DTypeError,
     "relu: expected a Tensor, got ndarray; ct.asarray makes one"),
    ("none", lambda x: ct.add(NONE, 1.0), ct.DTypeError,
     "add: expected two Tensors, or one and a number, got NoneType and float"),
    ("dtype", lambda x: x.astype("float64"), ct.DTypeError, "'float64' is not a storage type"),
    ("relu", lambda x: ct.tanh(x.astype("i32")), ct.DTypeError, "tanh: expected .*float.* got i32"),
    ("axis", lambda x: ct.softmax(x, axis=2), ct.ShapeError, r"axis of \[3, 4\], got 2"),
    ("kind", lambda x: ct.gelu(x, "erf"), ct.ShapeError,
     "gelu: expected approximate of none, tanh, quick"),
]  # fmt: skip


MISTAKES += [
    (f"eps {eps}", lambda x, eps=eps, norm=norm: norm(x, eps=eps), ct.ShapeError,
     rf"\w+: expected a finite eps of 0 or more, got {eps}")
    for norm in (ct.rms_norm, ct.layer_norm, ct.l2_normalize, lambda x, eps: nn.RMSNorm(4, eps),
                 lambda x, eps: nn.LayerNorm(4, eps))
    for eps in (-1, -1e-9, math.nan, math.inf)
]  # fmt: skip
MISTAKES += [
    (f"{choice.__name__} of nothing", lambda x, choice=choice: choice(x[:, None, :0], axis=2),
     ct.ShapeError,
     rf"{choice.__name__}: expected at least one element along axis 2, got \[3, 1, 0\]")
    for choice in (ct.max, ct.min, ct.argmax)
]  # fmt: skip


@pytest.mark.parametrize(("name", "use", "kind", "text"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_mistakes_are_raised_where_they_are_made(
    device: ct.Device, name: str, use: Any, kind: type[Exception], text: str
) -> None:
    """Class and text are the same on every device; nothing is recorded."""
    x = ct.asarray(X, device=device)
    batch = device.batch()
    y = batch.upload(X)
    with pytest.raises(kind, match=text) as raised:
        use(x)
    assert isinstance(raised.value, ct.CentellaError)
    before = batch.num_operations
    with pytest.raises(kind, match=text), batch:
        use(y)
    assert batch.num_operations <= before + 1  # a cast of the operand may stand before the mistake
    np.testing.assert_array_equal((x + 1.0).numpy(), X + 1)


def stale(device: ct.Device) -> Any:
    state = ct.State(X, device=device)
    before = state.value
    state.assign(2)
    return lambda: before + 1.0


def discarded(device: ct.Device) -> Any:
    batch = device.batch()
    hidden = batch.relu(batch.upload(X))
    batch.execute(outputs=[batch.add(hidden, 1.0)])
    return hidden.numpy


def of_another_batch(device: ct.Device) -> Any:
    other = device.batch()
    waiting = other.relu(ct.asarray(X, device=device))
    return lambda: (device.batch().tanh(waiting), other)


def of_another_device(device: ct.Device) -> Any:
    other = ct.device("simulator" if device.name == "cpu" else "cpu")
    return lambda: ct.asarray(X, device=device) + ct.asarray(X, device=other)


def cache_of_three(device: ct.Device, *tokens: int) -> Any:
    """The last of appends of so many tokens each."""
    cache = ct.KVCache(1, 2, 4, 3, device=device)

    def append(count: int) -> None:
        k = ct.zeros((1, 2, count, 4), device=device)
        cache.append(k, k)

    for count in tokens[:-1]:
        append(count)
    return lambda: append(tokens[-1])


def read_in_a_capture(device: ct.Device) -> Any:
    return lambda: device.compile(lambda x: x * float(ct.sum(x)), X)


def too_small(device: ct.Device) -> Any:
    native = foreign(device, X)
    return lambda: ct.Tensor.from_buffer(native, (5, 5), "f32", device=device)


HERE = "recorded at .*test_errors.py:"
MISUSE: dict[str, tuple[Any, type[Exception], str]] = {
    "devices mixed": (of_another_device, ct.DeviceError,
                      r"add: operands on .* and \w+; move one with \.to\(device\)"),
    "a foreign tensor": (of_another_batch, ct.ContractError,
                         "tanh: the tensor belongs to another batch that has not been executed"),
    "a discarded tensor": (discarded, ct.DiscardedError, rf"relu \({HERE}\d+\) was not kept"),
    "a stale State": (stale, ct.ContractError,
                      r"State \[3, 4\] f32: a stale version \(of .*\); it was changed at .*"),
    "a full cache": (lambda d: cache_of_three(d, 2, 2), ct.KVCacheFullError,
                     "KVCache: 2 of 3 positions are filled; no room for 2 more"),
    "lengths beyond the capacity": (lambda d: cache_of_three(d, 5), ct.KVCacheFullError,
                                    "KVCache: 5 tokens at once; the capacity is 3"),
    "a value read in a captured function": (read_in_a_capture, ct.ContractError,
                                            "reduce: read while a function is captured"),
    "a buffer that is too small": (too_small, ct.ShapeError,
                                   r"import_buffer: shape \[5, 5\] of f32 .* needs 100 bytes; "
                                   "the buffer has 48"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_told_and_the_device_goes_on(device: ct.Device, name: str) -> None:
    """Usage flags of a driver's buffers are those of test_tensor.py's `TestWgpuBuffers`."""
    prepare, kind, text = MISUSE[name]
    x = ct.asarray(X, device=device)
    waiting = x * 2.0
    use = prepare(device)
    with pytest.raises(kind, match=f"^{text}") as raised:
        use()
    assert type(raised.value) is kind
    np.testing.assert_array_equal(waiting.numpy(), 2 * X)
    np.testing.assert_array_equal((x + 1.0).numpy(), X + 1)
    with device.batch() as batch:
        y = batch.relu(batch.upload(-X))
    np.testing.assert_array_equal(y.numpy(), np.zeros((3, 4)))


def test_without_an_adapter_the_text_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = pytest.importorskip("centella.backends.webgpu.adapter")
    monkeypatch.setattr(adapter, "adapters", list)
    with pytest.raises(ct.DeviceError, match=r"^no WebGPU adapter found") as raised:
        ct.device("webgpu", pool="exact")
    assert "apt-get install libvulkan1 mesa-vulkan-drivers" in str(raised.value)
