"""`ct.jit` and `device.compile`: a function captured once per signature, then replayed.

    @ct.jit
    def step(x):
        return ct.softmax(x @ w)

    y = step(x)          # captured at the first call, replayed at every call of this signature

The function is run once with placeholders; what it recorded becomes a plan that is kept ready, with
inputs and outputs of its own and temporaries that all captures of a device share. A replay
allocates, compiles and uploads nothing beyond the arrays that it is given. Tensors and States that
the function refers to are captured; Python numbers are part of the signature.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from itertools import count
from typing import Any, Generic, ParamSpec, TypeVar, overload
from weakref import WeakMethod

import numpy as np

from centella.dtypes import Array
from centella.errors import ContractError, DeviceError, ShapeError
from centella.host.forks import lock_of
from centella.host.interrupts import guard, interruptible, uninterrupted
from centella.host.log import logger
from centella.ledger.call_sites import call_site
from centella.record.recording import Recording
from centella.record.values import OUTSIDE, Value
from centella.runtime.device import Device
from centella.runtime.pending import Pending
from centella.runtime.readback import bytes_of, decode, sparse
from centella.runtime.replay import Replay
from centella.tensors.signature import CallArguments, fill, flatten
from centella.tensors.state import State, checked_out
from centella.tensors.tensor import Tensor

MANY = 64  # signatures of one function, of which a message says so
P = ParamSpec("P")
R = TypeVar("R")

# What a captured function is called with: its own arguments, or arrays where it takes tensors.
Argument = Tensor | Array | State | str | float | Sequence[Any] | Mapping[str, Any] | None


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

    @uninterrupted
    def __init__(
        self, fn: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any],
        device: str | Device | None = None,
    ) -> None:  # fmt: skip
        guard()
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        example = CallArguments(self.name, device, args, kwargs)
        self.device: Device = example.device
        self._captured_for = str(example)
        self._signature = example.signature
        self.device.recorder.flush()
        recording = Recording(self.device, explicit=True)
        recording.host_updates = []
        inputs = [
            Value(spec, self.device, f"input {i} of {self.name}", recording, OUTSIDE, call_site())
            for i, spec in enumerate(example.specs)
        ]
        tensors = [Tensor(value, value.spec) for value in inputs]
        try:
            result = self._capture(fn, example.filled(tensors), recording)
            self._keep(result, recording, inputs)
        except BaseException:
            with self.device.lock:
                recording.fail(f"capturing {self.name} failed")
            raise

    @interruptible
    def _capture(self, fn: Callable[..., R], arguments: Any, recording: Recording) -> R:
        args, kwargs = arguments
        with recording:
            return fn(*args, **kwargs)

    def _keep(self, result: R, recording: Recording, inputs: list[Value]) -> None:
        """Make a replay of what was recorded, with the tensors of `result` as its outputs."""
        outputs: list[Tensor] = []
        self._shape = flatten(result, outputs, (Tensor,))
        if not outputs and recording.empty:
            raise ContractError(f"{self.name}: expected tensors to be returned or States changed")
        for tensor in outputs:
            if tensor.device is not self.device:
                raise DeviceError(
                    f"{self.name}: captured on {self.device.name}, returns a tensor on "
                    f"{tensor.device.name}"
                )
        with recording:  # what lies among the inputs is overwritten by the next ones
            outputs = [t.copy() if t._value in inputs or sparse(t.spec) else t for t in outputs]
        self._views = [(t.spec, t._offset) for t in outputs]
        numbers = count()  # of read-backs
        self._reads = [(spec, next(numbers) if spec.size else None) for spec, _ in self._views]
        self._replay = Replay(
            self.device.executor, recording, inputs, [t._value for t in outputs],
            [bytes_of(t._value, t.spec, t._offset) for t in outputs if t.size], self.name,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Compiled {self.name} on {self.device.name}, {self._replay.launches} launches>"

    @property
    def launches(self) -> int:
        """Launches of a replay."""
        return self._replay.launches

    @property
    def nbytes(self) -> int:
        """Bytes of its inputs, its outputs, and the temporaries, which captures share."""
        return self._replay.nbytes

    def explain(self) -> str:
        """The plan: a table to read."""
        plan = self._replay.plan
        return "nothing is launched" if plan is None else plan.explain()

    def __call__(self, *args: Any, out: State | Sequence[State] | None = None, **kwargs: Any) -> R:
        """Replay it on other data of the same signature.

        Args:
            args, kwargs: as captured; tensors are copied on the device, arrays are uploaded in
                one write.
            out: States that get copies of the outputs, in order; else the outputs are valid until
                the next call, and `.copy()` keeps one. A parameter of the function that has this
                name is given by position.

        Raises:
            ContractError: the arguments have another signature.
            ShapeError, DTypeError, DeviceError: `out` has other States than one for each output, of
                its shape, dtype and device; nothing was run.
        """
        return self._run(self._checked(args, kwargs), out)

    def fetch(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Replay it and bring its outputs to the host, in one submission.

        Threads may share it: each gets the outputs of its own call.

        Args:
            args, kwargs: as captured.

        Returns:
            A Pending of what the function returned, with NumPy arrays in place of tensors.

        Raises:
            ContractError: the arguments have another signature, or a function is being captured.
            TransferForbidden: inside `ct.forbid("transfer")`, before anything is run.
        """
        call = self._checked(args, kwargs)
        call.check_readable(self.name)
        return self._fetch(call)

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        call = CallArguments(self.name, self.device, args, kwargs)
        if call.signature != self._signature:
            raise ContractError(f"{self.name}: captured for {self._captured_for}, got {call}")
        return call

    def _run(self, call: CallArguments, out: State | Sequence[State] | None = None) -> R:
        states = [] if out is None else self._checked_out(out)
        values = self._replay.run(self._data_of(call), call_site())
        outputs = [
            Tensor(v, spec, offset) for v, (spec, offset) in zip(values, self._views, strict=True)
        ]
        for state, tensor in zip(states, outputs, strict=False):
            state.assign(tensor)
        return fill(self._shape, outputs)  # type: ignore[no-any-return]  # as fn returned it

    def _checked_out(self, out: State | Sequence[State]) -> list[State]:
        states = out if isinstance(out, Sequence) else [out]
        if len(states) != len(self._views):
            raise ShapeError(
                f"{self.name}: expected {len(self._views)} States for out=, got {len(states)}"
            )
        return [
            checked_out(self.name, state, spec, self.device)
            for state, (spec, _) in zip(states, self._views, strict=True)
        ]

    def _fetch(self, call: CallArguments) -> Pending[Any]:
        ticket = self._replay.fetch(self._data_of(call), call_site())

        def finish() -> Any:
            arrays = [
                decode(np.empty(0, np.uint8) if number is None else ticket.data(number), spec)
                for spec, number in self._reads
            ]
            return fill(self._shape, arrays)

        return Pending([ticket], finish)

    def _data_of(self, call: CallArguments) -> list[Array | Value]:
        """Host arrays as they are; tensors as values that lie as the launches read them."""
        data: list[Array | Value] = []
        for leaf in call.leaves:
            if isinstance(leaf, Tensor):
                value = leaf.contiguous()._value
                self.device.recorder.materialise(value)
                data.append(value)
            else:
                data.append(leaf)
        return data


def method_of(method: Callable[P, R]) -> Callable[P, R]:
    """A method, to be captured by its own object, which it does not keep alive.

    `Jitted(self.step)` as an attribute of `self` would be a cycle: the memory of both would stay in
    use until the garbage collector runs, which knows nothing of a device's memory.
    """
    reference = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = reference()
        if bound is None:
            raise ReferenceError(f"{call.__qualname__}: its object no longer exists")
        return bound(*args, **kwargs)

    call.__name__, call.__qualname__ = method.__name__, method.__qualname__
    return call


class Jitted(Generic[P, R]):
    """What `ct.jit` makes: captured at the first call of each signature and replayed after it.

    Args:
        maxsize: captures to keep, the least recently used is dropped; None: all.
    """

    def __init__(
        self, fn: Callable[P, R], device: str | Device | None = None, maxsize: int | None = None
    ) -> None:
        if not callable(fn):
            raise TypeError(f"jit: expected a function, got {type(fn).__name__}")
        if maxsize is not None and maxsize < 1:
            raise ShapeError(f"jit: maxsize: expected 1 or more, or None, got {maxsize!r}")
        self._fn = fn
        self._device = device
        self._maxsize = maxsize
        self._captured: OrderedDict[Any, Compiled[R]] = OrderedDict()
        # One capture of a signature, whatever the threads.
        self._lock = lock_of(self, threading.RLock)
        self._name: str = getattr(fn, "__name__", type(fn).__name__)
        update_wrapper(self, fn)

    def __repr__(self) -> str:
        return f"<Jitted {self._name}, {len(self._captured)} captured>"

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def __call__(self, *args: Argument, **kwargs: Argument) -> R: ...

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Replay, after a capture where the signature is new; inside a capture, just call it."""
        call = CallArguments(self._name, self._device, args, kwargs)
        if call.capturing:
            return self._fn(*args, **kwargs)
        return self._compiled(call, args, kwargs)._run(call)

    @overload
    def fetch(self, *args: P.args, **kwargs: P.kwargs) -> Pending[Any]: ...

    @overload
    def fetch(self, *args: Argument, **kwargs: Argument) -> Pending[Any]: ...

    def fetch(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Replay and bring the outputs to the host, in one submission: see `Compiled.fetch`."""
        call = CallArguments(self._name, self._device, args, kwargs)
        call.check_readable(self._name)
        return self._compiled(call, args, kwargs)._fetch(call)

    @uninterrupted
    def _compiled(
        self, call: CallArguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Compiled[R]:
        key = (call.device, call.signature)
        with self._lock:
            captured = self._captured.get(key)
            if captured is None:
                captured = self._captured[key] = self._capture(call, args, kwargs)
                if self._maxsize is not None and len(self._captured) > self._maxsize:
                    self._captured.popitem(last=False)
                if self._maxsize is None and len(self._captured) == MANY:
                    logger("jit").warning(
                        "%s: %d signatures are captured, each with buffers of its own: pass what "
                        "changes as an array or a State, or bound them: maxsize=", self._name, MANY
                    )  # fmt: skip
            else:
                self._captured.move_to_end(key)
        return captured

    def _capture(
        self, call: CallArguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Compiled[R]:
        try:
            return Compiled(self._fn, args, dict(kwargs), call.device)
        except DeviceError as error:
            if self._device is None and not any(isinstance(x, Tensor) for x in call.leaves):
                error.args = (
                    f"{error}. No argument of {self._name} is a tensor, so it was captured on the "
                    f"default device; name its own: @ct.jit(device=...)",
                )
            raise

    @property
    def signatures(self) -> int:
        """Signatures captured and kept, each with buffers of its own."""
        return len(self._captured)

    @uninterrupted
    def clear(self) -> None:
        """Forget all captures and release their buffers."""
        with self._lock:
            self._captured.clear()


@overload
def jit(  # noqa: D418
    fn: Callable[P, R], /, *, device: str | Device | None = None, maxsize: int | None = None
) -> Jitted[P, R]:
    """`@ct.jit`."""


@overload
def jit(  # noqa: D418  # the rule of tests/package/test_exports.py knows no overloads
    *, device: str | Device | None = None, maxsize: int | None = None
) -> Callable[[Callable[P, R]], Jitted[P, R]]:
    """`@ct.jit(device=...)`."""


def jit(
    fn: Any = None, /, *, device: str | Device | None = None, maxsize: int | None = None
) -> Any:
    """Capture a function once per signature and replay it: `@ct.jit` or `@ct.jit(device=...)`.

    Args:
        fn: takes and returns tensors (also in tuples, lists, dicts); it must record the same work
            for equal signatures, and may not read a value.
        device: where; default: that of the first tensor among the arguments, else the default
            device.
        maxsize: captures to keep, as `functools.lru_cache` does; None: one of every signature.

    Returns:
        The function; outputs of a call are valid until its next call of the same signature, a
        State's `value` that it returns until that State next changes. Its `fetch(...)` gives arrays
        on the host instead, in the replay's own submission. All keywords of a call are the
        function's: only what `device.compile` returns has an `out=` of its own.

    Raises:
        ShapeError: a maxsize below 1; TypeError: fn is no function.
    """
    if fn is not None:
        return Jitted(fn, device, maxsize)
    return lambda function: Jitted(function, device, maxsize)
