"""The op that a user's kernel is: one launch, and the simulator as its host program."""

from __future__ import annotations

from itertools import count as counter

import numpy as np
from msgspec import Struct

from centella.backends.base import Array
from centella.emit.program import Call, Constants, HostProgram, Kernel, Ref, parameter_words
from centella.op.op import Form, Lowered, Op, Out
from centella.specs import Caps, Spec, make_spec, strided

SIMULATED = Caps(target="ir", max_shared=1 << 20, max_workgroup=1024, max_storage_buffers=64)
_names = counter(1)


class LaunchAttrs(Struct, frozen=True):
    """A launch of a user's kernel: results that are new, parameters, constants, groups."""

    outs: tuple[Out, ...]
    scalars: tuple[tuple[str, int | float], ...]
    constants: Constants
    groups: int


class UserOp(Op[LaunchAttrs], frozen=True, eq=False, kw_only=True):
    """The op that a user's kernel is: its host program is the simulator.

    The registry, which holds the library's own ops, does not know it; it lives as long as plans
    or its kernel use it.
    """

    kernel: Kernel

    def __post_init__(self) -> None:
        """Stay out of the registry."""

    def host_program(self, form: Form[LaunchAttrs]) -> HostProgram:
        """The launch in the simulator, bounds checked only, on words laid out as on a GPU."""
        padded_in, padded_out = _padded(form.inputs), _padded(form.outputs)
        padded = Form(self, padded_in, padded_out, form.attrs)
        call = padded.lower(SIMULATED).calls[0]
        dtypes = tuple(r.spec.dtype for r in call.tensors)
        program = self.kernel.program(
            SIMULATED, dtypes, (True,) * len(dtypes), call.constants, None, None
        )
        words, _ = parameter_words(call, program.ir)

        mutates = self.mutates

        from centella.simulator.run import simulate

        def run(arrays: list[Array], outs: list[Array]) -> None:
            buffers = [_words(a, s) for a, s in zip(arrays, padded_in, strict=True)]
            buffers += [buffers[i] for i in mutates]
            fresh = padded_out[len(mutates) :]
            buffers += [np.zeros(s.storage_bytes // 4, np.uint32) for s in fresh]
            bound = [buffers[r.index] for r in call.tensors]
            simulate(program.ir, bound, np.array(words, np.uint32), call.groups, check=False)
            for out, words_of, spec in zip(outs, buffers[len(arrays) :], padded_out, strict=True):
                np.copyto(out, strided(words_of, spec).reshape(spec.shape))

        return HostProgram(f"simulated:{self.name}", self.kernel.name, run)


def op_of(kernel: Kernel) -> UserOp:
    """The op of a kernel, with a name of its own."""
    reads = [param.mode for _, param in kernel.signature.tensors if param.mode != "out"]
    mutates = tuple(i for i, mode in enumerate(reads) if mode == "inout")

    def rule(specs: tuple[Spec, ...], attrs: LaunchAttrs) -> tuple[Out, ...]:
        return (*((specs[i].shape, specs[i].dtype) for i in mutates), *attrs.outs)

    def lower(form: Form[LaunchAttrs], caps: Caps) -> Lowered:
        """One launch."""
        refs: list[Ref] = []
        position = {"in": 0, "out": len(form.inputs) + len(mutates)}
        for _, param in kernel.signature.tensors:
            kind = "out" if param.mode == "out" else "in"
            refs.append(Ref(position[kind], (*form.inputs, *form.outputs)[position[kind]]))
            position[kind] += 1
        launch = form.attrs
        call = Call(kernel, tuple(refs), launch.scalars, launch.constants, launch.groups)
        return Lowered((call,))

    name = f"kernel:{kernel.name}:{next(_names)}"
    return UserOp(name, rule, None, lower, attrs=LaunchAttrs, mutates=mutates, fills=False,
                  kernel=kernel)  # fmt: skip


def _padded(specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
    """Rows on 16 bytes, as on a GPU."""
    return tuple(make_spec(s.shape, s.dtype, 16) for s in specs)


def _words(array: Array, spec: Spec) -> Array:
    """The words that store an array."""
    words = np.zeros(spec.storage_bytes // 4, np.uint32)
    strided(words, spec)[...] = array
    return words
