"""`ct.kernel`: a user's kernel, launched like an op, on every backend.

    @ct.kernel(workgroup=256)
    def scale(x: ct.In[ct.f32], y: ct.Out[ct.f32], n: ct.u32, s: ct.f32):
        i = lang.global_id()
        with lang.if_(i < n):
            y[i] = x[i] * s

    scale(x, y, n=x.size, s=2.0, threads=x.size)

On a GPU it is compiled; on the CPU the simulator computes it, unchecked. `simulate` checks it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from centella.dtypes import DType, dtype_of
from centella.errors import DTypeError, ShapeError, TraceError
from centella.lang.face import REQUIRED, TensorParam
from centella.lang.ir import KernelIR
from centella.lang.simulate import simulate
from centella.op import Lowered, Op
from centella.program import Call, HostProgram, Kernel, Program, Ref, parameter_words, program_of
from centella.recording import Value
from centella.specs import Caps, Spec, dense_strides, make_spec
from centella.tensor import Tensor

Array = np.ndarray[Any, Any]


class UserKernel:
    """A kernel of the user's: call it to record a launch; print its `source`; `simulate` it."""

    def __init__(self, fn: Callable[..., Any], workgroup: int) -> None:
        if workgroup < 1 or workgroup > 1024:
            raise TraceError(f"workgroup: expected 1 to 1024 threads, got {workgroup}")
        self._kernel = Kernel(fn, workgroup=workgroup, trusted=False)
        self.__name__ = fn.__name__
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn
        self._ops: dict[Any, Op] = {}

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
        """
        tensors, scalars, constants = self._bind(args, named)
        count = self._groups(threads, groups)
        face = self._kernel.face
        modes = [p.mode for _, p in face.tensors]
        if "inout" in modes:
            raise TraceError(
                f"{self.__name__}: InOut arguments need a State; write to an Out argument instead"
            )
        ins = [t for t, m in zip(tensors, modes, strict=True) if m != "out"]
        outs = [t for t, m in zip(tensors, modes, strict=True) if m == "out"]
        where = tensors[0].device
        ins = [self._fit(t, p) for t, (_, p) in zip(
            ins, [x for x in face.tensors if x[1].mode != "out"], strict=True)]  # fmt: skip
        attrs = {
            "outs": tuple((t.shape, t.dtype) for t in outs),
            "scalars": tuple(scalars.items()),
            "constants": tuple(constants.items()),
            "groups": count,
        }
        operands = [(t._value, t.spec, t._offset) for t in ins]
        values = where.record(self._op(), operands, attrs) if operands else self._no_input(
            where, attrs)  # fmt: skip
        for handle, value in zip(outs, values, strict=True):
            handle._value, handle._offset, handle.spec = value, 0, value.spec

    def _no_input(self, where: Any, attrs: dict[str, Any]) -> tuple[Value, ...]:
        return where.record(self._op(), [], attrs)  # type: ignore[no-any-return]

    def _fit(self, tensor: Tensor, param: TensorParam) -> Tensor:
        """The tensor with the rank the kernel declares; chunk loads need aligned rows."""
        if param.mode == "scalar":
            return tensor
        if param.rank == 2 and tensor.ndim != 2:
            raise ShapeError(
                f"{self.__name__}: expected a tensor of rank 2, got {list(tensor.shape)}"
            )
        if param.rank == 1 and tensor.ndim != 1:
            tensor = tensor.reshape(-1)
        return tensor if tensor.spec.aligned or not tensor.spec.unit_rows else tensor.contiguous()

    def _bind(
        self, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
        face = self._kernel.face
        order = [n for n, _ in face.tensors] + [n for n, _ in face.scalars]
        positions = [n for n in self._positional() if n in order]
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
            raise TraceError(
                f"{self.__name__}: missing {missing or 'nothing'}, unknown {extra or 'nothing'}, "
                f"given twice {sorted(twice) or 'nothing'}"
            )
        tensors = []
        for name, param in face.tensors:
            tensor = given[name]
            if not isinstance(tensor, Tensor):
                raise DTypeError(
                    f"{self.__name__}: expected a Tensor for {name!r}, got {type(tensor).__name__}"
                )
            if param.dtype is not None and tensor.dtype is not param.dtype:
                raise DTypeError(
                    f"{self.__name__}: expected {param.dtype.name} for {name!r}, got "
                    f"{tensor.dtype.name}"
                )
            tensors.append(tensor)
        if not tensors:
            raise TraceError(f"{self.__name__}: a kernel needs a tensor argument")
        return tensors, {n: given[n] for n, _ in face.scalars}, constants

    def _positional(self) -> list[str]:
        import inspect

        return list(inspect.signature(self.__wrapped__).parameters)

    def _groups(self, threads: int | None, groups: int | None) -> int:
        if (threads is None) == (groups is None):
            raise TraceError(f"{self.__name__}: give threads= or groups=")
        return groups if groups is not None else -(-(threads or 0) // self._kernel.workgroup)

    def _op(self) -> Op:
        if "op" not in self._ops:
            name = f"kernel:{self.__name__}:{id(self):x}"
            self._ops["op"] = _KernelOp(self, name).op
        return self._ops["op"]

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
        subgroup: int = 32, **named: Any,
    ) -> dict[str, Array]:  # fmt: skip
        """Run in the simulator on NumPy arrays, with every check.

        Args:
            args, named: as in a launch, with arrays for tensors; outputs give shape and dtype.

        Returns:
            The outputs by name.

        Raises:
            SimulationError: out of bounds, race, read of unwritten memory, divergent barrier; an
                output element that no thread wrote.
        """
        from centella.device import device
        from centella.tensor import asarray

        where = device("simulator", checked=check)
        wrap = {n for n, _ in self._kernel.face.tensors}
        positions = self._positional()
        wrapped = [
            asarray(a, device=where) if positions[i] in wrap else a for i, a in enumerate(args)
        ]
        for name in wrap & set(named):
            named[name] = asarray(named[name], device=where)
        self(*wrapped, threads=threads, groups=groups, **named)
        handles = {**dict(zip(positions, wrapped, strict=False)), **named}
        return {
            n: handles[n].numpy() for n, p in self._kernel.face.tensors if p.mode == "out"
        }


class _KernelOp:
    """The op that a user's kernel is."""

    def __init__(self, user: UserKernel, name: str) -> None:
        self.user = user
        self.op = _UserOp(name, self.rule, self.reference, self.lower, doc=user.__doc__ or "")
        object.__setattr__(self.op, "launch", self.host)

    def rule(self, specs: tuple[Spec, ...], attrs: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(attrs["outs"])

    def reference(self, *arrays: Any, **attrs: Any) -> Any:
        raise NotImplementedError("a user's kernel has no NumPy formula")

    def lower(
        self, inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any], caps: Caps
    ) -> Lowered:
        """One launch."""
        face = self.user._kernel.face
        refs: list[Ref] = []
        place = {"in": 0, "out": len(inputs)}
        for _, param in face.tensors:
            kind = "out" if param.mode == "out" else "in"
            index = place[kind]
            place[kind] += 1
            spec = (*inputs, *outputs)[index]
            refs.append(Ref(index, _ranked(spec, param.rank)))
        call = Call(
            self.user._kernel, tuple(refs), attrs["scalars"], attrs["constants"], attrs["groups"]
        )
        return Lowered((call,))

    def host(
        self, inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any]
    ) -> HostProgram:
        """The launch in the simulator, unchecked, on word arrays laid out as on a GPU."""
        padded_in = tuple(make_spec(s.shape, s.dtype, 16) for s in inputs)
        padded_out = tuple(make_spec(s.shape, s.dtype, 16) for s in outputs)
        caps = Caps(target="ir", max_shared=1 << 20, max_workgroup=1024, max_storage_buffers=64)
        call = self.lower(padded_in, padded_out, attrs, caps).calls[0]
        dtypes = tuple(r.spec.dtype for r in call.tensors)
        program = call.kernel.program(caps, dtypes, (True,) * len(dtypes), call.constants, None,
                                      None)  # fmt: skip
        words, _ = parameter_words(call, program.ir)

        def run(arrays: list[Array]) -> list[Array]:
            buffers = [_words(a, s) for a, s in zip(arrays, padded_in, strict=True)]
            buffers += [np.zeros(s.storage_bytes // 4, np.uint32) for s in padded_out]
            bound = [buffers[r.index] for r in call.tensors]
            simulate(program.ir, bound, np.array(words, np.uint32), call.groups, check=False)
            return [_from_words(b, s) for b, s in zip(buffers[len(arrays) :], padded_out,
                                                      strict=True)]  # fmt: skip

        return HostProgram(f"simulated:{self.op.name}", self.user.__name__, run)


class _UserOp(Op):
    """An op whose host program is the simulator."""

    __slots__ = ("launch",)

    def host_program(
        self, inputs: tuple[Spec, ...], outputs: tuple[Spec, ...], attrs: dict[str, Any]
    ) -> HostProgram:
        return self.launch(inputs, outputs, attrs)  # type: ignore[no-any-return]


def _ranked(spec: Spec, rank: int) -> Spec:
    if rank == 2 or len(spec.shape) == 1:
        return spec
    return Spec((spec.size,), spec.dtype, (1,), spec.aligned)


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


def kernel(*, workgroup: int = 256) -> Callable[[Callable[..., Any]], UserKernel]:
    """Declare a kernel: `@ct.kernel(workgroup=256)`; see the module's example."""

    def declare(fn: Callable[..., Any]) -> UserKernel:
        return UserKernel(fn, workgroup)

    return declare


__all__ = ["DType", "Program", "UserKernel", "kernel"]
