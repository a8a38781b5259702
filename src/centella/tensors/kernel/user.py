"""`UserKernel`: launch, print and simulate a kernel of the user's; `kernel` declares one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NoReturn, overload

import numpy as np

from centella.backends.base import Array
from centella.dtypes import dtype_of
from centella.emit.program import Kernel, Program, parameter_words, program_of
from centella.errors import LimitError, TraceError
from centella.lang.ir import KernelIR
from centella.lang.kernel_params import TensorParam
from centella.lang.rounds import loops_of
from centella.op.op import Form
from centella.runtime.device import Device, device
from centella.specs import Caps, Spec, make_spec
from centella.tensors.creation import asarray
from centella.tensors.kernel.arguments import bind, check_written, group_count, host_array
from centella.tensors.kernel.op import SIMULATED, LaunchAttrs, op_of
from centella.tensors.state import State
from centella.tensors.tensor import Tensor, apply_all

CHECKED = 4096  # launches of a kernel, before it is forgotten that their loops were counted


class UserKernel:
    """A kernel of the user's: call it to record a launch; print its `source`; `simulate` it."""

    __name__: str

    def __init__(self, fn: Callable[..., Any], workgroup: int) -> None:
        if workgroup not in range(1, 1025):
            raise TraceError(f"workgroup: expected 1 to 1024 threads, got {workgroup!r}")
        self._kernel = Kernel(fn, workgroup=workgroup, trusted=False)
        self._op = op_of(self._kernel)
        self._within_rounds: set[Any] = set()  # launches whose loops no driver stops
        self.__name__ = fn.__name__
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn

    def __repr__(self) -> str:
        return f"<centella.kernel {self.__name__} workgroup={self._kernel.workgroup}>"

    def __getitem__(self, _: object) -> NoReturn:
        name = self.__name__
        raise TraceError(f"{name}: expected a call, as in {name}(x, y, threads=x.size), got [...]")

    @cached_property
    def _positions(self) -> tuple[str, ...]:
        """Names that positional arguments may fill: all but constants, as the function has them."""
        names = inspect.signature(self._kernel.fn).parameters
        return tuple(n for n in names if n in self._kernel.signature.operands)

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
                `InOut` takes a State, which is changed in place.
            threads: threads to run, rounded up to whole groups; or `groups`: groups to run.

        Raises:
            TraceError, ShapeError, DTypeError: where the arguments do not fit the declaration.
            LimitError: the device has fewer threads, bindings or less shared memory; groups that
                are no whole number of the kernel's clusters (`ptx.cluster`); loops longer than the
                driver lets them run.
        """
        bound = bind(self._kernel, self._positions, args, named)
        wanted = group_count(self._kernel, threads, groups)
        check_written(self._kernel, bound, wanted)
        where = bound.tensors[0][0].device
        pairs = [(t if p.mode == "out" else _fit(t, p), p) for t, p in bound.tensors]
        ins = [t for t, p in pairs if p.mode != "out"]
        outs = [(t, p) for t, p in pairs if p.mode == "out"]
        attrs: dict[str, Any] = {
            "outs": tuple((_out_shape(t.shape, p.rank), t.dtype) for t, p in outs),
            "scalars": bound.scalars,
            "constants": bound.constants,
            "groups": wanted,
        }
        self._check_program(where, pairs, attrs)
        if ins:
            results = apply_all(self._op, ins, attrs)
        else:
            values = where.recorder.record(self._op, [], attrs)
            results = tuple(Tensor(v, v.spec) for v in values)
        changed = len(self._op.mutates)  # States, which have their next version already
        for (handle, _), result in zip(outs, results[changed:], strict=True):
            shaped = result.reshape(handle.shape)
            handle._value, handle._offset, handle.spec = shaped._value, shaped._offset, shaped.spec

    def _check_program(
        self, where: Device, pairs: list[tuple[Tensor, TensorParam]], attrs: dict[str, Any]
    ) -> None:
        """Trace and emit now, so that a mistake is raised at the launch's own line."""
        host, groups = where.caps.on_host, attrs["groups"]
        caps = SIMULATED if host else where.caps
        program = self._kernel.program(
            caps,
            tuple(t.dtype for t, _ in pairs),
            tuple(host or p.mode == "out" or t.spec.unit_rows for t, p in pairs),
            attrs["constants"],
            None,
            None,
        )
        if text := program.ir.refused(groups):
            raise LimitError(f"{self.__name__}: {text}")
        if caps.max_loop_rounds and loops_of(program.ir).outer:
            specs = tuple(t.spec for t, p in pairs if p.mode != "out")
            key = (caps, program, specs, attrs["outs"], attrs["scalars"], groups)
            if key not in self._within_rounds:
                self._check_rounds(program, caps, specs, LaunchAttrs(**attrs))
                if len(self._within_rounds) >= CHECKED:
                    self._within_rounds.clear()
                self._within_rounds.add(key)

    def _check_rounds(
        self, program: Program, caps: Caps, specs: tuple[Spec, ...], attrs: LaunchAttrs
    ) -> None:
        changed = tuple(specs[i] for i in self._op.mutates)
        fresh = tuple(make_spec(*out, caps.row_alignment) for out in attrs.outs)
        call = Form(self._op, specs, (*changed, *fresh), attrs).lower(caps).calls[0]
        words, _ = parameter_words(call, program.ir)
        self._kernel.within_rounds(program, caps, words, attrs.groups)

    # -- looking ----------------------------------------------------------------------------------

    def ir(self, dtypes: dict[str, Any] | None = None, **constants: Any) -> KernelIR:
        """The traced kernel; `dtypes` names the storage of arguments declared `storage`.

        Raises:
            TraceError: for one without a dtype, or of another than declared; for names and
                constants that the kernel does not have; where the language cannot express it.
        """
        signature = self._kernel.signature
        chosen = {n: dtype_of(d) for n, d in (dtypes or {}).items()}
        unknown = [n for n in chosen if n not in signature.tensor_names]
        unknown += [n for n in constants if n not in dict(signature.constants)]
        if unknown:
            raise TraceError(f"{self.__name__}: unknown {unknown}")
        kinds = []
        for name, param in signature.tensors:
            kind = chosen.get(name, param.dtype)
            if kind is None:
                raise TraceError(f"{self.__name__}: say dtypes={{{name!r}: ...}}")
            kinds.append(kind)
        return self._kernel.specialise(tuple(kinds), (), tuple(sorted(constants.items())))

    def source(
        self, target: str = "wgsl", *, arch: str = "sm_80", dtypes: dict[str, Any] | None = None,
        **constants: Any,
    ) -> str:  # fmt: skip
        """The text for a target: "wgsl", "ptx" (with `arch`) or "ir".

        Raises:
            TraceError: another target; as for `ir`.
        """
        if target not in ("wgsl", "ptx", "ir"):
            raise TraceError(f"source: expected wgsl, ptx or ir, got {target!r}")
        caps = Caps(target=target, arch=arch, max_shared=1 << 20, max_workgroup=1024,
                    max_storage_buffers=64, subgroups=True, native_exp2=True)  # fmt: skip
        return program_of(self.ir(dtypes, **constants), caps).source

    def simulate(
        self, *args: Any, threads: int | None = None, groups: int | None = None, check: bool = True,
        order: str = "forward", subgroup: int = 32, **named: Any,
    ) -> dict[str, Array]:  # fmt: skip
        """Run in the simulator on NumPy arrays, with every check.

        Args:
            args, named: as in a launch, with arrays for tensors, of the declared dtype; of an
                output the shape counts, and the dtype where none is declared.
            check: False checks bounds only.
            order: in which order threads run: "forward", "reverse" or "shuffled".
            subgroup: lanes of a subgroup.

        Returns:
            The outputs by name, and what `InOut` arguments hold afterwards.

        Raises:
            DTypeError: an array of another dtype.
            SimulationError: out of bounds, race, read of unwritten memory, divergent barrier; an
                output element that no thread wrote.
        """
        where = device("simulator", checked=check, order=order, subgroup=subgroup)
        params = dict(self._kernel.signature.tensors)

        def moved(name: str, value: Any) -> Any:
            if name not in params:
                return value
            return _moved(host_array(self._kernel, name, value, params[name]), params[name], where)

        count = len(self._positions)
        placed = dict(zip(self._positions, args, strict=False))
        placed = {n: moved(n, value) for n, value in placed.items()}
        arguments = {n: moved(n, value) for n, value in named.items()}
        self(*placed.values(), *args[count:], threads=threads, groups=groups, **arguments)
        results = arguments | placed
        return {n: results[n].numpy() for n, p in params.items() if p.mode in ("out", "inout")}


def _fit(tensor: Tensor, param: TensorParam) -> Tensor:
    """The tensor with the rank the kernel declares; on a GPU, chunk loads need aligned rows.

    A kernel is shown 16 bytes of an empty tensor, so that has memory of its own.
    """
    if param.rank == 1 and tensor.ndim != 1:
        tensor = tensor.reshape(-1)
    if param.mode == "scalar":
        return tensor
    if tensor.device.caps.on_host:
        return tensor
    empty = tensor.size == 0 and param.mode == "in"
    plain = tensor.spec.aligned or not tensor.spec.unit_rows
    return tensor if plain and not empty else tensor.copy()


def _moved(array: Array, param: TensorParam, where: Device) -> Tensor | State:
    """An array on a device; of an output only shape and dtype count."""
    if param.mode == "inout":
        return State(array, param.dtype, where)
    if param.mode == "out" and param.dtype is not None:
        array = np.broadcast_to(np.zeros((), param.dtype.numpy), array.shape)
    return asarray(array, param.dtype, where)


def _out_shape(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """A kernel writes rank 1 densely, whatever the shape; it is reshaped afterwards."""
    return shape if rank == 2 else (math.prod(shape),)


@overload
def kernel(fn: Callable[..., Any], /, *, workgroup: int = 256) -> UserKernel:  # noqa: D418
    """`@ct.kernel`."""


@overload
def kernel(  # noqa: D418  # the rule of tests/package/test_exports.py knows no overloads
    *, workgroup: int = 256
) -> Callable[[Callable[..., Any]], UserKernel]:
    """`@ct.kernel(workgroup=256)`."""


def kernel(fn: Callable[..., Any] | None = None, /, *, workgroup: int = 256) -> Any:
    """Declare a kernel: `@ct.kernel` or `@ct.kernel(workgroup=256)`.

    Args:
        fn: takes tensors (`x: ct.In[ct.f32]`), launch parameters (`n: ct.u32`) and constants, which
            are keyword-only; it is traced once for each specialisation.
        workgroup: threads a group, 1 to 1024.

    Returns:
        A UserKernel, to be called with `threads=` or `groups=`.

    Raises:
        TraceError: no function, a parameter without such an annotation, or another workgroup; what
            the function does is looked at when it is launched, or printed.
    """
    if fn is not None:
        if not callable(fn):
            raise TraceError(f"kernel: expected a function, got {fn!r}; say workgroup={fn!r}")
        return UserKernel(fn, workgroup)

    def declare(fn: Callable[..., Any]) -> UserKernel:
        return UserKernel(fn, workgroup)

    return declare
