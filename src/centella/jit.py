"""`ct.jit` and `device.compile`: a function captured once per signature, then replayed.

    @ct.jit
    def step(x):
        return ct.softmax(x @ w)

    y = step(x)          # captured at the first call, replayed at every call of this signature

The function is run once with placeholders; what it recorded becomes a plan with buffers of its own.
A replay allocates, compiles and uploads nothing beyond the arrays that it is given. Tensors and
States that the function refers to are captured; Python numbers are part of the signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar, overload

import numpy as np

from centella.device import Device, current_device
from centella.device import device as open_device
from centella.dtypes import from_host_array
from centella.errors import ContractError, DeviceError, DTypeError, ShapeError
from centella.prepare import storage_of
from centella.program import exact
from centella.recording import OUTSIDE, Recording, Value, call_site, innermost
from centella.replay import Replay
from centella.specs import Spec
from centella.state import State
from centella.submission import Array
from centella.tensor import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Leaf = Tensor | Array


class _Slot:
    """Where a leaf stood in nested containers."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _flatten(value: Any, leaves: list[Any], kinds: tuple[type, ...]) -> Any:
    """Nested tuples, lists and dicts with their leaves taken out, in order."""
    if isinstance(value, kinds):
        leaves.append(value)
        return _Slot(len(leaves) - 1)
    if isinstance(value, (tuple, list)):
        parts = [_flatten(v, leaves, kinds) for v in value]
        if isinstance(value, list):
            return parts
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, dict):
        return {k: _flatten(v, leaves, kinds) for k, v in value.items()}
    return value


def _fill(shape: Any, leaves: Sequence[Any]) -> Any:
    """Undo `_flatten` with other leaves."""
    if isinstance(shape, _Slot):
        return leaves[shape.index]
    if isinstance(shape, list):
        return [_fill(v, leaves) for v in shape]
    if isinstance(shape, tuple):
        parts = [_fill(v, leaves) for v in shape]
        return type(shape)(*parts) if hasattr(shape, "_fields") else tuple(parts)
    if isinstance(shape, dict):
        return {k: _fill(v, leaves) for k, v in shape.items()}
    return shape


def _key(shape: Any) -> Any:
    """A container's form as a dictionary key."""
    if isinstance(shape, _Slot):
        return "leaf"
    if isinstance(shape, (tuple, list)):
        return type(shape), tuple(_key(v) for v in shape)
    if isinstance(shape, dict):
        return dict, tuple((k, _key(v)) for k, v in shape.items())
    try:
        hash(shape)
    except TypeError as error:
        raise DTypeError(
            f"jit: expected tensors, arrays, numbers and containers of them, got "
            f"{type(shape).__name__}"
        ) from error
    same = isinstance(shape, float) and shape != shape  # every NaN is one constant
    return type(shape), "nan" if same else exact(shape)


class Compiled(Generic[R]):
    """A function captured for one signature; calling it replays its plan.

    Args:
        fn: what to capture; it runs once, here.
        args, kwargs: examples: tensors and NumPy arrays become inputs, everything else is fixed.
        device: default: that of the first tensor among the examples, else the default device.

    Raises:
        ContractError: the function reads a value while it is captured, or returns no tensors.
        CentellaError: a kernel does not compile, or there is no memory.
    """

    def __init__(
        self, fn: Callable[..., R], args: Sequence[Any], kwargs: dict[str, Any],
        device: str | Device | None = None,
    ) -> None:  # fmt: skip
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        leaves: list[Leaf] = []
        shape = _flatten((tuple(args), kwargs), leaves, (Tensor, np.ndarray))
        self.device: Device = open_device(device) if device is not None else _device_of(leaves)
        self._specs = [_spec_of(self.device, leaf) for leaf in leaves]
        self._signature = _signature(self.device, shape, leaves)
        self.device.flush_thread()
        recording = Recording(self.device, explicit=True)
        recording.marks = []
        inputs = [
            Value(spec, self.device, f"input {i} of {self.name}", recording, OUTSIDE, call_site())
            for i, spec in enumerate(self._specs)
        ]
        given = [Tensor(value, value.spec) for value in inputs]
        result = self._capture(fn, _fill(shape, given), recording)
        outputs: list[Tensor] = []
        self._shape = _flatten(result, outputs, (Tensor,))
        with recording:  # what lies among the inputs is overwritten by the next ones
            outputs = [t.copy() if t._value in inputs else t for t in outputs]
        if not outputs and recording.empty:
            raise ContractError(f"{self.name}: expected tensors to be returned or States changed")
        for tensor in outputs:
            if tensor.device is not self.device:
                raise DeviceError(
                    f"{self.name}: captured on {self.device.name}, returns a tensor on "
                    f"{tensor.device.name}"
                )
        self._views = [(t.spec, t._offset) for t in outputs]
        self._replay = Replay(
            self.device, recording, inputs, [t._value for t in outputs], self.name
        )

    def _capture(self, fn: Callable[..., R], given: Any, recording: Recording) -> R:
        args, kwargs = given
        try:
            with recording:
                return fn(*args, **kwargs)
        except BaseException:
            recording.fail(f"capturing {self.name} failed")
            raise

    def __repr__(self) -> str:
        return f"<Compiled {self.name} on {self.device.name}, {self._replay.launches} launches>"

    @property
    def launches(self) -> int:
        """Launches of a replay."""
        return self._replay.launches

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that it owns."""
        return self._replay.nbytes

    def explain(self) -> str:
        """The plan: a table to read."""
        made = self._replay.plan
        return "nothing is launched" if made is None else made.explain()

    def __call__(self, *args: Any, out: State | Sequence[State] | None = None, **kwargs: Any) -> R:
        """Replay it on other data of the same signature.

        Args:
            args, kwargs: as captured; tensors are copied on the device, arrays are uploaded in
                one write.
            out: States that get copies of the outputs, in order; else the outputs are valid until
                the next call, and `.copy()` keeps one.

        Raises:
            ContractError: the arguments have another signature.
        """
        leaves: list[Leaf] = []
        shape = _flatten((args, kwargs), leaves, (Tensor, np.ndarray))
        signature = _signature(self.device, shape, leaves)
        if signature != self._signature:
            raise ContractError(
                f"{self.name}: captured for {_said(self._signature)}, got {_said(signature)}"
            )
        return self._run(leaves, out)

    def _run(self, leaves: Sequence[Leaf], out: State | Sequence[State] | None = None) -> R:
        site = call_site()
        given = [self._input(x, spec) for x, spec in zip(leaves, self._specs, strict=True)]
        _, values = self._replay.run(given, site)
        outputs = [
            Tensor(v, spec, offset) for v, (spec, offset) in zip(values, self._views, strict=True)
        ]
        if out is not None:
            states = [out] if isinstance(out, State) else list(out)
            if len(states) != len(outputs):
                raise ShapeError(
                    f"{self.name}: expected {len(outputs)} States for out=, got {len(states)}"
                )
            for state, tensor in zip(states, outputs, strict=True):
                state.assign(tensor)
        return _fill(self._shape, outputs)  # type: ignore[no-any-return]  # as fn returned it

    def _input(self, x: Leaf, spec: Spec) -> Array | Value:
        if not isinstance(x, Tensor):
            array, kind = from_host_array(self.name, x, None)
            return storage_of(array, self.device.spec(array.shape, kind), 0)
        whole = x.contiguous()
        self.device.materialise(whole._value)
        return whole._value


def _device_of(leaves: Sequence[Leaf]) -> Device:
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            return leaf.device
    return current_device()


def _spec_of(device: Device, leaf: Leaf) -> Spec:
    if isinstance(leaf, Tensor):
        if leaf.device is not device:
            raise DeviceError(
                f"jit: expected tensors on {device.name}, got one on {leaf.device.name}; move it "
                f"with .to(device)"
            )
        return device.spec(leaf.shape, leaf.dtype)
    array, kind = from_host_array("jit", leaf, None)
    return device.spec(array.shape, kind)


def _signature(device: Device, shape: Any, leaves: Sequence[Leaf]) -> tuple[Any, ...]:
    specs = [_spec_of(device, leaf) for leaf in leaves]
    return (_key(shape), *((s.shape, s.dtype.name) for s in specs))


def _said(signature: tuple[Any, ...]) -> str:
    """The inputs of a signature, as errors print them."""
    inputs = ", ".join(f"{name} {list(shape)}" for shape, name in signature[1:])
    return f"({inputs})" if inputs else "(no tensors)"


class Jitted(Generic[P, R]):
    """A function that is captured at the first call of each signature and replayed after it."""

    def __init__(self, fn: Callable[P, R], device: str | Device | None = None) -> None:
        self._fn = fn
        self._device = device
        self._made: dict[Any, Compiled[R]] = {}
        update_wrapper(self, fn)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Replay, after a capture where the signature is new; inside a capture, just call it."""
        leaves: list[Leaf] = []
        shape = _flatten((args, kwargs), leaves, (Tensor, np.ndarray))
        device = open_device(self._device) if self._device is not None else _device_of(leaves)
        inside = innermost(device)
        if inside is not None and inside.marks is not None:
            return self._fn(*args, **kwargs)
        key = (device, _signature(device, shape, leaves))
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = Compiled(self._fn, args, dict(kwargs), device)
        return found._run(leaves)

    @property
    def signatures(self) -> int:
        """Signatures captured so far, each with buffers of its own."""
        return len(self._made)

    def clear(self) -> None:
        """Forget all captures and release their buffers."""
        self._made.clear()


@overload
def jit(  # noqa: D418
    fn: Callable[P, R], /, *, device: str | Device | None = None
) -> Jitted[P, R]:
    """`@ct.jit`."""


@overload
def jit(  # noqa: D418  # the rule of tests/test_exports.py knows no overloads
    *, device: str | Device | None = None
) -> Callable[[Callable[P, R]], Jitted[P, R]]:
    """`@ct.jit(device=...)`."""


def jit(fn: Any = None, /, *, device: str | Device | None = None) -> Any:
    """Capture a function once per signature and replay it: `@ct.jit` or `@ct.jit(device=...)`.

    Args:
        fn: takes and returns tensors (also in tuples, lists, dicts); it must record the same work
            for equal signatures, and may not read a value.

    Returns:
        The function; outputs of a call are valid until its next call of the same signature.
    """
    if fn is not None:
        return Jitted(fn, device)
    return lambda function: Jitted(function, device)


__all__ = ["Compiled", "Jitted", "jit"]
