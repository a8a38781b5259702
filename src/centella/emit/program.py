"""Kernels and programs: what an op lowers to, and what a backend compiles.

A `Kernel` is a traced function; `specialise` gives its IR for given dtypes and constants, and
`program_of` the text that one target compiles. A `HostProgram` is its counterpart on the CPU: a
NumPy formula. Programs are equal when their keys are: target and content, never an address.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import DType
from centella.emit.emission import Emission, Text
from centella.errors import LimitError, TraceError
from centella.host.forks import lock_of
from centella.lang.ir import KernelIR
from centella.lang.kernel_params import REQUIRED, Signature, signature_of
from centella.lang.rounds import Copies, copies_within, loops_of, rounds_of, turns_of
from centella.lang.trace import trace
from centella.specs import Caps, Spec

Constants = tuple[tuple[str, Any], ...]
Emit = Callable[[KernelIR, Caps, Emission], Text]
# By `Caps.target`: the module whose `emit` writes it, which loads with the first kernel for it.
EMITTERS = {
    "wgsl": "centella.emit.wgsl.target",
    "ptx": "centella.emit.ptx.target",
    "ir": "centella.emit.listing",
}


def exact(value: Any) -> Any:
    """A value as a key that tells 1 from 1.0 and True, and 0.0 from -0.0; NaN equals itself."""
    kind = type(value)
    if kind is str:
        return value  # no tuple equals it
    if kind is tuple:
        return tuple([exact(v) for v in value])
    if kind is float and (value == 0.0 or value != value):
        return kind, str(value)
    if isinstance(value, np.generic):
        return value.dtype, value.tobytes()
    return kind, value


class Kernel:
    """A kernel function with its signature; the specialisations traced so far.

    `moves` says that it stores what it loads, so that what nobody wrote may be among it.
    `rewritable` says that its results hold where a driver rewrites float arithmetic other than
    sums: it has no formula of a user's, and is not kept from that where it would be slower.
    """

    def __init__(
        self, fn: Callable[..., Any], *, workgroup: int, name: str = "",
        signature: Signature | None = None, trusted: bool = True, moves: bool = False,
        rewritable: bool = False,
    ) -> None:  # fmt: skip
        self.fn: Callable[..., Any] = fn
        self.trusted: bool = trusted
        self.moves: bool = moves
        self.rewritable: bool = rewritable
        self.name: str = name or fn.__name__
        self.workgroup: int = workgroup
        self._signature = signature
        self._traced: dict[Any, KernelIR] = {}
        self._programs: dict[Any, Program] = {}
        self._lock = lock_of(self)
        self.__doc__ = fn.__doc__

    @property
    def signature(self) -> Signature:
        """The parameters, read from the annotations at first use."""
        if self._signature is None:
            self._signature = signature_of(self.fn)
        return self._signature

    def specialise(
        self, dtypes: tuple[DType, ...], unit: tuple[bool, ...] = (), constants: Constants = (),
        workgroup: int | None = None, signature: Signature | None = None,
    ) -> KernelIR:  # fmt: skip
        """The traced kernel for these storage dtypes, innermost strides and constants."""
        size = workgroup or self.workgroup
        used = signature or self.signature
        key = (dtypes, unit, exact(constants), size, used)
        with self._lock:
            ir = self._traced.get(key)
            if ir is None:
                names = used.tensor_names
                values = {n: d for n, d in used.constants if d is not REQUIRED}
                values.update(constants)
                missing = [n for n, _ in used.constants if n not in values]
                if missing:
                    raise TraceError(f"kernel {self.name!r}: constant {missing[0]!r} has no value")
                kinds = dict(zip(names, dtypes, strict=True))
                dense = dict(zip(names, unit or (True,) * len(names), strict=True))
                ir = self._traced[key] = trace(
                    self.fn, used, workgroup=size, dtypes=kinds, unit=dense, constants=values,
                    name=self.name,
                )  # fmt: skip
        return ir

    def program(
        self, caps: Caps, dtypes: tuple[DType, ...], unit: tuple[bool, ...], constants: Constants,
        workgroup: int | None, signature: Signature | None,
    ) -> Program:  # fmt: skip
        """The program of one specialisation on one kind of device, remembered."""
        key = (caps, dtypes, unit, exact(constants), workgroup, signature)
        program = self._programs.get(key)
        if program is None:
            ir = self.specialise(dtypes, unit, constants, workgroup, signature)
            program = self._programs[key] = self._emitted(ir, caps)
        return program

    def _emitted(
        self, ir: KernelIR, caps: Caps, copies: Copies = (), reports: bool = False
    ) -> Program:
        return program_of(ir, caps, self.trusted, self.moves, copies, self.rewritable, reports)

    def within_rounds(
        self, program: Program, caps: Caps, words: Sequence[int], groups: int
    ) -> Program:
        """A program of this kernel as a launch needs it where drivers stop long loops.

        Raises:
            LimitError: a thread would run over `caps.max_loop_rounds`, however it is written.
        """
        most = caps.max_loop_rounds
        copies = copies_within(program.ir, words, groups, most)
        turns = turns_of(program.ir, words, groups)
        if copies is None:
            rounds = rounds_of(loops_of(program.ir).outer, turns)
            raise LimitError(
                f"kernel {self.name!r}: expected at most {most:,} rounds of its loops in a thread, "
                f"where the driver of this device stops them, got {rounds:,}; let more threads "
                f"share the work, or launch it in parts"
            )
        reports = math.inf in turns.values()
        if not copies and not reports:
            return program
        key = (caps, program.key, copies, reports)
        other = self._programs.get(key)
        if other is None:
            other = self._programs[key] = self._emitted(program.ir, caps, copies, reports)
        return other


class _Keyed(Struct, frozen=True, eq=False):
    key: str

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class Program(_Keyed, frozen=True, eq=False):
    """What a backend compiles: target text with its identity.

    `trusted` marks the library's own kernels, which the simulator has passed: a driver may compile
    them without bounds checks of its own. A user's kernel is never trusted. One that `reports`
    counts in a word of the device how often its driver has stopped a loop.
    """

    target: str
    name: str
    source: str
    ir: KernelIR
    trusted: bool = False
    moves: bool = False
    reports: bool = False


class HostProgram(_Keyed, frozen=True, eq=False):
    """What the CPU runs: `call(inputs, outputs)`, which writes into the arrays of its outputs.

    Attributes:
        overwrites: inputs that it writes whole and never reads.
        views: how it sees its operands, inputs and outputs; None: as they are.
    """

    name: str
    call: Callable[[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]], None]
    overwrites: tuple[int, ...] = ()
    views: tuple[Spec, ...] | None = None


def program_of(
    ir: KernelIR, caps: Caps, trusted: bool = False, moves: bool = False, copies: Copies = (),
    rewritable: bool = False, reports: bool = False,
) -> Program:  # fmt: skip
    """Emit a traced kernel for a device.

    Args:
        copies: how often bodies of loops stand in it (`lang.rounds`).
        rewritable: a driver may rewrite its float arithmetic other than sums.
        reports: it has loops that nobody can count, for a driver that stops them.

    Raises:
        LimitError: for more shared memory, threads or bindings than the device has, or for
            subgroup operations or operations of `centella.lang.ptx` where it has none; a target
            without an emitter.
    """
    noted = 4 * ir.workgroup if reports else 0
    limits = (
        ("threads a workgroup", ir.workgroup, caps.max_workgroup),
        ("bytes of workgroup memory", _workgroup_memory(ir, caps) + noted, caps.max_shared),
        ("storage buffers", len(ir.args) + reports, caps.max_storage_buffers),
    )
    for what, asked, most in limits:
        if asked > most:
            raise LimitError(f"kernel {ir.name!r}: {asked} {what}; this device has {most}")
    if caps.target not in EMITTERS:
        raise LimitError(
            f"kernel {ir.name!r}: expected a device of {', '.join(EMITTERS)}, got {caps.target}"
        )
    emit: Emit = import_module(EMITTERS[caps.target]).emit
    text = emit(ir, caps, Emission(trusted, rewritable, copies, reports))
    return Program(text.key, caps.target, ir.name, text.source, ir, trusted, moves, reports)


def _workgroup_memory(ir: KernelIR, caps: Caps) -> int:
    """Bytes of workgroup memory, as a device counts them.

    WGSL has a variable for each `workgroup_uniform`, and WebGPU rounds each variable up to 16.
    """
    if caps.target != "wgsl":
        return ir.shared_bytes
    chunks = sum(-(-array.words // 4) for array in ir.shared)
    return 16 * (chunks + sum(statement[0] == "workgroup_uniform" for statement in ir.body))


class Ref(Struct, frozen=True):
    """An operand of a call: which of (inputs, outputs, temporaries), seen as `spec`."""

    index: int
    spec: Spec
    offset: int = 0


class Call(Struct, frozen=True):
    """One launch of a kernel, as an op asks for it.

    Attributes:
        kernel: what runs; signature: its parameters when they depend on the call.
        tensors: operands in the order of the signature's tensor parameters.
        scalars: values of the scalar parameters, by name.
        constants: values that choose the program.
        groups: workgroups of the launch.
        reason: of a launch that only copies an operand for the next: what of it, and why.
    """

    kernel: Kernel
    tensors: tuple[Ref, ...]
    scalars: tuple[tuple[str, int | float], ...]
    constants: Constants
    groups: int
    workgroup: int | None = None
    signature: Signature | None = None
    reason: str = ""


def parameter_words(call: Call, ir: KernelIR) -> tuple[list[int], list[tuple[int, int]]]:
    """Raw 32-bit words of a launch's parameters, and which are offsets of which operand.

    Returns:
        The words (offsets hold the static part), and pairs (position, operand of the call) whose
        buffer offset, known when the plan runs, is to be added.

    Raises:
        LimitError: a number that its parameter does not hold, or that no tensor map can have;
            groups that are no whole clusters.
    """
    if text := ir.refused(call.groups):
        raise LimitError(f"kernel {ir.name!r}: {text}")
    names = {a.name: i for i, a in enumerate(ir.args)}
    scalars = dict(call.scalars)
    words: list[int] = []
    patches: list[tuple[int, int]] = []
    for position, param in enumerate(ir.params):
        head, *rest = param.source
        if not rest:
            words.append(raw_word(scalars[str(head)], param.type))
            continue
        operand = names[str(head)]
        ref = call.tensors[operand]
        if rest[0] == "offset":
            words.append(ref.offset)
            patches.append((position, operand))
        elif rest[0] == "stride":
            words.append(ref.spec.strides[int(rest[1])])
        else:
            words.append(ref.spec.shape[int(rest[1])])
    for tensor_map in ir.maps:
        if text := tensor_map.refused(words):
            raise LimitError(f"kernel {ir.name!r}: {text}")
    return words, patches


def raw_word(value: int | float, type_: str) -> int:
    """The 32 bits of a scalar parameter."""
    if type_ == "f32":
        return int(np.float32(value).view(np.uint32))
    low, high = (-(2**31), 2**31) if type_ == "i32" else (0, 2**32)
    if not low <= value < high:
        raise LimitError(f"{value} does not fit a {type_} parameter")
    return int(value) & 0xFFFFFFFF
