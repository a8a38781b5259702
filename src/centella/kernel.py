"""`ct.kernel`: a user's kernel, launched like an op, on every backend.

    @ct.kernel(workgroup=256)
    def scale(x: ct.In[ct.f32], y: ct.Out[ct.f32], n: ct.u32, s: ct.f32):
        i = lang.global_id()
        with lang.if_(i < n):
            y[i] = x[i] * s

    scale(x, y, n=x.size, s=2.0, threads=x.size)

On a GPU it is compiled; on the CPU the simulator computes it and checks bounds only. `simulate`
checks everything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import count as counter
from typing import Any, overload

import numpy as np

from centella.device import Device, device
from centella.dtypes import DType, dtype_of
from centella.errors import DeviceError, DTypeError, LimitError, ShapeError, TraceError
from centella.lang.face import REQUIRED, TensorParam
from centella.lang.ir import KernelIR
from centella.lang.simulate import simulate
from centella.op import Lowered, Op
from centella.program import (
    Call,
    Constants,
    HostProgram,
    Kernel,
    Ref,
    parameter_words,
    program_of,
    raw_word,
)
from centella.specs import Caps, Spec, dense_strides, make_spec
from centella.submission import Array
from centella.tensor import Tensor, apply_all, asarray

SIMULATED = Caps(target="ir", max_shared=1 << 20, max_workgroup=1024, max_storage_buffers=64)
_names = counter(1)


MAX_GROUPS = 1 << 31  # what every backend can launch


class UserKernel:
    """A kernel of the user's: call it to record a launch; print its `source`; `simulate` it."""

    def __init__(self, fn: Callable[..., Any], workgroup: int) -> None:
        if workgroup not in range(1, 1025):
            raise TraceError(f"workgroup: expected 1 to 1024 threads, got {workgroup!r}")
        self._kernel = Kernel(fn, workgroup=workgroup, trusted=False)
        self._positions = list(inspect.signature(fn).parameters)
        self._op = _op_of(self._kernel)
        self.__name__ = fn.__name__
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn

    def __repr__(self) -> str:
        return f"<centella.kernel {self.__name__} workgroup={self._kernel.workgroup}>"

    # -- launching --------------------------------------------------------------------------------

    def __call__(
        self,
        *args: Any,
        threads: int | None = None,
        groups: int | None = None,
        **named: Any,
    ) -> None:
        """Record one launch.

        Args:
            args, named: tensors and scalars, as the function declares them; keyword-only ones are
                constants. An `Out` tensor gets a new value; the handle passed then refers to it.
            threads: threads to run, rounded up to whole groups; or `groups`: groups to run.

        Raises:
            TraceError, ShapeError, DTypeError: where the arguments do not fit the declaration.
            LimitError: the device has fewer threads, bindings or less shared memory.
        """
        tensors, scalars, constants = self._bind(args, named)
        wanted = self._groups(threads, groups)
        where = tensors[0].device
        pairs = [
            (t if p.mode == "out" else self._fit(t, p), p)
            for t, (_, p) in zip(tensors, self._kernel.face.tensors, strict=True)
        ]
        self._check_program(where, pairs, constants)
        ins = [t for t, p in pairs if p.mode != "out"]
        outs = [(t, p) for t, p in pairs if p.mode == "out"]
        attrs: dict[str, Any] = {
            "outs": tuple((_out_shape(t.shape, p.rank), t.dtype) for t, p in outs),
            "scalars": scalars,
            "constants": constants,
            "groups": wanted,
        }
        if ins:
            made = apply_all(self._op, ins, attrs)
        else:
            values = where.record(self._op, [], attrs)
            made = tuple(Tensor(v, v.spec) for v in values)
        for (handle, _), result in zip(outs, made, strict=True):
            shaped = result.reshape(handle.shape)
            handle._value, handle._offset, handle.spec = shaped._value, shaped._offset, shaped.spec

    def _fit(self, tensor: Tensor, param: TensorParam) -> Tensor:
        """The tensor with the rank the kernel declares; on a GPU, chunk loads need aligned rows."""
        if param.mode == "scalar":
            return tensor if tensor.ndim == 1 else tensor.reshape(-1)
        if param.rank == 1 and tensor.ndim != 1:
            tensor = tensor.reshape(-1)
        plain = tensor.device.caps.target == "numpy" or tensor.spec.aligned
        return tensor if plain or not tensor.spec.unit_rows else tensor.copy()

    def _check_program(
        self, where: Device, pairs: list[tuple[Tensor, TensorParam]], constants: Constants
    ) -> None:
        """Trace and emit now, so that a mistake is raised at the launch's own line."""
        host = where.caps.target == "numpy"
        self._kernel.program(
            SIMULATED if host else where.caps,
            tuple(t.dtype for t, _ in pairs),
            tuple(host or p.mode == "out" or t.spec.unit_rows for t, p in pairs),
            constants,
            None,
            None,
        )

    def _bind(
        self, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[list[Tensor], tuple[tuple[str, int | float], ...], Constants]:
        face = self._kernel.face
        order = [n for n, _ in face.tensors] + [n for n, _ in face.scalars]
        positions = [n for n in self._positions if n in order]
        if len(args) > len(positions):
            raise TraceError(
                f"{self.__name__}: expected at most {len(positions)} arguments, got {len(args)}"
            )
        given = dict(zip(positions, args, strict=False))
        twice = set(given) & set(named)
        given.update(named)
        constants = {n: given.pop(n, d) for n, d in face.constants}
        missing = [n for n in order if n not in given]
        missing += [n for n, v in constants.items() if v is REQUIRED]
        extra = [n for n in given if n not in order]
        if missing or extra or twice:
            wrong = {"missing": missing, "unknown": extra, "given twice": sorted(twice)}
            said = ", ".join(f"{what} {names}" for what, names in wrong.items() if names)
            raise TraceError(f"{self.__name__}: {said}")
        tensors = [self._tensor(name, given[name], param) for name, param in face.tensors]
        if not tensors:
            raise TraceError(f"{self.__name__}: a kernel needs a tensor argument")
        where = dict.fromkeys(t.device for t in tensors)
        if len(where) > 1:
            names = " and ".join(d.name for d in where)
            raise DeviceError(f"{self.__name__}: operands on {names}; move one with .to(device)")
        handles = [
            id(t) for t, (_, p) in zip(tensors, face.tensors, strict=True) if p.mode == "out"
        ]
        if len(set(handles)) < len(handles):
            raise TraceError(f"{self.__name__}: one tensor is given for two Out arguments")
        scalars = tuple((n, self._scalar(n, given[n], kind)) for n, kind in face.scalars)
        for name, value in constants.items():
            try:
                hash(value)
            except TypeError as error:
                raise TraceError(
                    f"{self.__name__}: constant {name!r} chooses the program and must be hashable, "
                    f"got {value!r}"
                ) from error
        return tensors, scalars, tuple(constants.items())

    def _tensor(self, name: str, tensor: Any, param: TensorParam) -> Tensor:
        if param.mode == "inout":
            raise TraceError(
                f"{self.__name__}: InOut arguments need a State; write to an Out argument instead"
            )
        if not isinstance(tensor, Tensor):
            raise DTypeError(
                f"{self.__name__}: expected a Tensor for {name!r}, got {type(tensor).__name__}"
            )
        if param.dtype is not None and tensor.dtype is not param.dtype:
            raise DTypeError(
                f"{self.__name__}: expected {param.dtype.name} for {name!r}, got "
                f"{tensor.dtype.name}"
            )
        if param.rank == 2 and tensor.ndim != 2:
            raise ShapeError(
                f"{self.__name__}: expected rank 2 for {name!r}, got {list(tensor.shape)}"
            )
        if param.mode == "scalar" and tensor.size != 1:
            raise ShapeError(
                f"{self.__name__}: expected one element for {name!r}, got {list(tensor.shape)}"
            )
        return tensor

    def _scalar(self, name: str, value: Any, kind: str) -> int | float:
        """A launch parameter as a Python number, when it fits."""
        if isinstance(value, Tensor):
            raise DTypeError(
                f"{self.__name__}: expected a number for {name!r}, got a Tensor; declare it "
                f"Scalar[{kind}] to pass a value in device memory"
            )
        plain = value.item() if isinstance(value, np.generic) else value
        if not isinstance(plain, (int, float) if kind == "f32" else int):
            raise DTypeError(f"{self.__name__}: expected {kind} for {name!r}, got {value!r}")
        try:
            raw_word(plain, kind)
        except (LimitError, OverflowError) as error:
            raise DTypeError(f"{self.__name__}: {name!r}: {error}") from error
        return plain

    def _groups(self, threads: int | None, groups: int | None) -> int:
        given = groups if threads is None else threads
        if given is None or (threads is not None and groups is not None):
            raise TraceError(f"{self.__name__}: give threads= or groups=")
        if type(given) is bool or not hasattr(given, "__index__") or given < 0:
            raise TraceError(
                f"{self.__name__}: expected a number of threads or groups, got {given!r}"
            )
        count = int(given) if threads is None else -(-int(given) // self._kernel.workgroup)
        if count >= MAX_GROUPS:
            raise LimitError(
                f"{self.__name__}: expected fewer than {MAX_GROUPS:,} groups, got {count:,}"
            )
        return count

    # -- looking ----------------------------------------------------------------------------------

    def ir(self, dtypes: dict[str, Any] | None = None, **constants: Any) -> KernelIR:
        """The traced kernel; `dtypes` names the storage of arguments declared `storage`."""
        face = self._kernel.face
        chosen = {n: dtype_of(d) for n, d in (dtypes or {}).items()}
        kinds = []
        for name, param in face.tensors:
            kind = param.dtype or chosen.get(name)
            if kind is None:
                raise TraceError(f"{self.__name__}: say dtypes={{{name!r}: ...}}")
            kinds.append(kind)
        return self._kernel.specialise(tuple(kinds), (), tuple(sorted(constants.items())))

    def source(
        self, target: str = "wgsl", *, arch: str = "sm_80", dtypes: dict[str, Any] | None = None,
        **constants: Any,
    ) -> str:  # fmt: skip
        """The text for a target: "wgsl", "ptx" (with `arch`) or "ir"."""
        if target not in ("wgsl", "ptx", "ir"):
            raise TraceError(f"source: expected wgsl, ptx or ir, got {target!r}")
        caps = Caps(target=target, arch=arch, max_shared=1 << 20, max_workgroup=1024,
                    max_storage_buffers=64)  # fmt: skip
        return program_of(self.ir(dtypes, **constants), caps).source

    def simulate(
        self, *args: Any, threads: int | None = None, groups: int | None = None, check: bool = True,
        order: str = "forward", subgroup: int = 32, **named: Any,
    ) -> dict[str, Array]:  # fmt: skip
        """Run in the simulator on NumPy arrays, with every check.

        Args:
            args, named: as in a launch, with arrays for tensors; outputs give shape and dtype.
            check: False checks bounds only.
            order: in which order threads run: "forward", "reverse" or "shuffled".
            subgroup: lanes of a subgroup.

        Returns:
            The outputs by name.

        Raises:
            SimulationError: out of bounds, race, read of unwritten memory, divergent barrier; an
                output element that no thread wrote.
        """
        where = device("simulator", checked=check, order=order, subgroup=subgroup)
        tensors = dict(self._kernel.face.tensors)
        given = {**dict(zip(self._positions, args, strict=False)), **named}
        for name, param in tensors.items():
            if name in given:
                array = np.asarray(given[name])
                if param.mode == "out" and param.dtype is not None:
                    array = np.broadcast_to(np.zeros((), param.dtype.numpy), array.shape)
                given[name] = asarray(array, param.dtype, where)
        extra = args[len(self._positions) :]
        self(*extra, threads=threads, groups=groups, **given)
        return {n: given[n].numpy() for n, p in tensors.items() if p.mode == "out"}


def _out_shape(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """A kernel writes rank 1 densely, whatever the shape; it is reshaped afterwards."""
    if rank == 2 or len(shape) == 1:
        return shape
    size = 1
    for extent in shape:
        size *= extent
    return (size,)


class _UserOp(Op):
    """The op that a user's kernel is: its host program is the simulator.

    The registry, which holds the library's own ops, does not know it; it lives as long as plans
    or its kernel use it.
    """

    __slots__ = ("kernel",)
    kernel: Kernel

    def __post_init__(self) -> None:
        """Stay out of the registry."""

    def host_program(
        self, inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any]
    ) -> HostProgram:
        """The launch in the simulator, bounds checked only, on words laid out as on a GPU."""
        padded_in = tuple(make_spec(s.shape, s.dtype, 16) for s in inputs)
        padded_out = tuple(make_spec(s.shape, s.dtype, 16) for s in outputs)
        call = self.lower(padded_in, padded_out, attrs, SIMULATED).calls[0]
        dtypes = tuple(r.spec.dtype for r in call.tensors)
        program = self.kernel.program(
            SIMULATED, dtypes, (True,) * len(dtypes), call.constants, None, None
        )
        words, _ = parameter_words(call, program.ir)

        def run(arrays: list[Array]) -> list[Array]:
            buffers = [_words(a, s) for a, s in zip(arrays, padded_in, strict=True)]
            buffers += [np.zeros(s.storage_bytes // 4, np.uint32) for s in padded_out]
            bound = [buffers[r.index] for r in call.tensors]
            simulate(program.ir, bound, np.array(words, np.uint32), call.groups, check=False)
            made = zip(buffers[len(arrays) :], padded_out, strict=True)
            return [_from_words(b, s) for b, s in made]

        return HostProgram(f"simulated:{self.name}", self.kernel.name, run)


def _op_of(kernel: Kernel) -> Op:
    def rule(specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(attrs["outs"])

    def reference(*arrays: Any, **attrs: Any) -> Any:
        raise NotImplementedError("a user's kernel has no NumPy formula")

    def lower(
        inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
    ) -> Lowered:
        """One launch."""
        refs: list[Ref] = []
        place = {"in": 0, "out": len(inputs)}
        for _, param in kernel.face.tensors:
            kind = "out" if param.mode == "out" else "in"
            refs.append(Ref(place[kind], (*inputs, *outputs)[place[kind]]))
            place[kind] += 1
        scalars, constants = attrs["scalars"], attrs["constants"]
        return Lowered((Call(kernel, tuple(refs), scalars, constants, attrs["groups"]),))

    made = _UserOp(f"kernel:{kernel.name}:{next(_names)}", rule, reference, lower)
    object.__setattr__(made, "kernel", kernel)
    return made


def _words(array: Array, spec: Spec) -> Array:
    flat = np.zeros(spec.storage_bytes // spec.dtype.itemsize, spec.dtype.numpy)
    item = spec.dtype.itemsize
    np.ndarray(spec.shape, spec.dtype.numpy, flat.data, 0, [s * item for s in spec.strides])[
        ...
    ] = array
    return flat.view(np.uint32)


def _from_words(words: Array, spec: Spec) -> Array:
    item = spec.dtype.itemsize
    if spec.strides == dense_strides(spec.shape):
        return words.view(spec.dtype.numpy)[: spec.size].reshape(spec.shape)
    return np.ndarray(
        spec.shape, spec.dtype.numpy, words.data, 0, [s * item for s in spec.strides]
    ).copy()


@overload
def kernel(fn: Callable[..., Any], /, *, workgroup: int = 256) -> UserKernel:  # noqa: D418
    """`@ct.kernel`."""


@overload
def kernel(  # noqa: D418  # the rule of tests/test_exports.py knows no overloads
    *, workgroup: int = 256
) -> Callable[[Callable[..., Any]], UserKernel]:
    """`@ct.kernel(workgroup=256)`."""


def kernel(fn: Callable[..., Any] | None = None, /, *, workgroup: int = 256) -> Any:
    """Declare a kernel: `@ct.kernel` or `@ct.kernel(workgroup=256)`; see the module's example."""
    if fn is not None:
        if not callable(fn):
            raise TraceError(f"kernel: expected a function, got {fn!r}; say workgroup={fn!r}")
        return UserKernel(fn, workgroup)

    def declare(fn: Callable[..., Any]) -> UserKernel:
        return UserKernel(fn, workgroup)

    return declare


__all__ = ["DType", "UserKernel", "kernel"]
