"""The exception tree: what derives from what, what texts carry, where foreign errors end."""

from __future__ import annotations

import builtins
import copy
import inspect
import pickle
import re
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import errors

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
    "MissingExtraError": ("gguf", "models"),
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
    made = kind(*MADE.get(kind.__name__, ("what happened",)))
    for base in kind.__mro__[1:-1]:
        with pytest.raises(base):
            raise made
    assert str(made)
    assert isinstance(made, ct.CentellaError)
    assert not hasattr(builtins, kind.__name__)


@pytest.mark.parametrize("kind", every(), ids=lambda c: c.__name__)
def test_an_error_travels_between_processes(kind: type[ct.CentellaError]) -> None:
    made = kind(*MADE.get(kind.__name__, ("what happened",)))
    for again in (pickle.loads(pickle.dumps(made)), copy.copy(made)):
        assert type(again) is kind
        assert str(again) == str(made)
        assert again.__dict__ == made.__dict__


def test_a_compile_error_shows_numbered_source_and_the_log() -> None:
    source = "\n".join(f"line {i}" for i in range(1, 13))
    error = ct.CompileError("gelu", source, "error: line 7 is bad\n")
    assert (error.name, error.source, error.log) == ("gelu", source, "error: line 7 is bad\n")
    text = str(error)
    assert text.startswith("kernel 'gelu' did not compile:\nerror: line 7 is bad\n\n")
    assert " 7 | line 7\n" in text
    assert "12 | line 12" in text


def test_a_missing_extra_has_the_line_to_type() -> None:
    error = ct.MissingExtraError("gguf", "models")
    assert (error.package, error.extra) == ("gguf", "models")
    assert str(error) == "'gguf' is not installed; install it with: pip install 'centella[models]'"


@pytest.mark.devices("webgpu")
def test_source_that_a_driver_refuses(device: ct.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real compile failure: the text has the op, the line, the driver's log and the source."""
    from centella.program import Program

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
    ("kind", lambda x: ct.gelu(x, "erf"), ct.ShapeError, "gelu: expected none, tanh or quick"),
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
