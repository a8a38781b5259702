"""An op (a shape rule, a NumPy formula, kernels, a choice among them), and what it is asked to do.

An op knows no backend and no Tensor. Everything else about it (recording, planning, running,
testing) is generic over this class.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict, replace

from centella.dtypes import Array, DType, narrow, widen
from centella.emit.program import Call, HostProgram, Ref
from centella.host.interrupts import uninterrupted
from centella.op.axes import LETTERS, WHOLE, Axes, Part, axes, spread
from centella.specs import Caps, Shape, Spec

Out = tuple[Shape, DType]
A = TypeVar("A", bound=Struct)
A_co = TypeVar("A_co", bound=Struct, covariant=True)
UNDIVIDED: Mapping[str, Part] = MappingProxyType({})


class Lowered(Struct, frozen=True):
    """The launches of an op on a device, with the temporaries they share."""

    calls: tuple[Call, ...]
    temporaries: tuple[Spec, ...] = ()

    def __add__(self, after: Lowered) -> Lowered:
        """These launches, then others of the same op."""
        return Lowered(self.calls + after.calls, self.temporaries + after.temporaries)

    def within(
        self, operands: Sequence[int], first: int, offsets: Mapping[int, int] = MappingProxyType({})
    ) -> Lowered:
        """These launches as some of another op's.

        Args:
            operands: what each operand and result of this op is in the other.
            first: the number there of the first of its temporaries.
            offsets: of an operand, the element of the other's that it begins at.
        """
        to = (*operands, *range(first, first + len(self.temporaries)))

        def moved(ref: Ref) -> Ref:
            return Ref(to[ref.index], ref.spec, ref.offset + offsets.get(ref.index, 0))

        calls = (replace(c, tensors=tuple(map(moved, c.tensors))) for c in self.calls)
        return Lowered(tuple(calls), self.temporaries)


def loaded(where: str) -> Any:
    """What a module has, by "module:name"; the module is imported with the first such call."""
    module, name = where.split(":")
    return getattr(import_module(module), name)


def named(attrs: Struct) -> dict[str, Any]:
    """The attributes that are given, as keyword arguments of a formula."""
    return {n: v for n, v in asdict(attrs).items() if v is not None}


class Form(Struct, Generic[A_co], frozen=True, eq=False):
    """What an op is asked to do; a device has one Form for equal requests.

    Attributes:
        inputs: how each operand is seen.
        outputs: how each result will lie in memory; `nbytes` of them all.
        attrs: its attributes, as `Op.attrs` declares them.
        copies: operands whose layout the op does not take.
        parts: of each letter that it is told, where this part of the op lies.
    """

    op: Op[Any]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    attrs: A_co
    nbytes: int = 0
    copies: tuple[int, ...] = ()
    parts: Mapping[str, Part] = UNDIVIDED

    def lower(self, caps: Caps) -> Lowered:
        """The launches on a device."""
        where = self.op.lowering
        lowering: Lower[Any] = loaded(where) if isinstance(where, str) else where
        return lowering(self, caps)

    def within_binding(self, caps: Caps) -> bool:
        """Whether a launch may see all of each operand and result at once."""
        return all(s.storage_bytes <= caps.safe_binding for s in (*self.inputs, *self.outputs))

    def part(self, letter: str, extent: int) -> Part:
        """The part of a letter that is asked for.

        Args:
            extent: of the letter as the op sees it, which is the whole where nothing is divided.
        """
        return self.parts.get(letter, Part(0, extent, extent))


Lower = Callable[[Form[A], Caps], Lowered]


def broadcasting(form: Form[Any]) -> Axes:
    """Of an op whose operands broadcast to its one result, element by element."""
    letters = LETTERS[: len(form.outputs[0].shape)]
    return axes([spread(s.shape, letters) for s in form.inputs], [letters])


def along_rows(form: Form[Any]) -> Axes:
    """Of an op that works along the last dimension; operands broadcast to its one result."""
    letters = LETTERS[: len(form.outputs[0].shape) - 1] + WHOLE
    return axes([spread(s.shape, letters) for s in form.inputs], [letters])


class NoAttrs(Struct, frozen=True):
    """The attributes of an op that has none."""


def anything(index: int, spec: Spec) -> bool:
    """Takes every layout."""
    return True


def unit_rows(index: int, spec: Spec) -> bool:
    """Takes tensors whose last dimension has stride 1."""
    return spec.unit_rows


class Op(Struct, Generic[A], frozen=True, eq=False):
    """One operation.

    Attributes:
        name: as users call it.
        rule: `rule(specs, attrs) -> outputs (shape, dtype)`; raises ShapeError or DTypeError.
        reference: `reference(*arrays, **attrs) -> array or tuple`, on float32 or float64 arrays;
            None for an op that has another host program.
        lowering: `lowering(form, caps) -> Lowered`, or where that is, as "module:name": such a
            module loads with the first plan that needs it.
        takes: whether input `index` may lie as `spec`; a copy is recorded where it may not.
        variants: names that `variant=` accepts, for tests and benchmarks.
        attrs: the frozen Struct of its attributes; one that is None is not given.
        mutates: inputs that it changes in place, each a State: output `i` is the next version of
            input `mutates[i]`, in the same memory. The formula changes those arrays themselves.
        overwrites: those of them that it writes whole and never reads: they may hold anything.
        element: `element(values, attrs) -> value` on traced values, numbers among the attributes
            too, where each element of the result depends on the same of each operand alone.
        formula: `formula(o, values, attrs) -> value` on the operand set `o`, numbers among the
            attributes; the CPU runs it on blocks, where all operands are f32 or bool. Without it
            the reference is called with whole arrays.
        host: `host(form) -> write(inputs, outputs)`: what the CPU calls instead
            for operands that it takes as they are; None where the reference has to do.
        axes: `axes(form) -> Axes`: how it is divided where an operand is larger
            than a launch may see; None where it cannot be.
        flops: `flops(form) -> int`: arithmetic operations, at most; None where
            they are few for each byte.
        preferred: `preferred(form, caps)`, of an op that stands for several others: whether a
            kernel of its own is better, or forced and fits; else those are recorded in its place.
        narrower: whether they take operands that its rule refuses.
        fills: whether it writes all elements of its results; a kernel of a user's may leave some.
        unread: `unread(form, outputs) -> Form | None`: what is to be computed in its place where
            nobody reads these outputs; as many results, those that are read in the same order.
    """

    name: str
    rule: Callable[[tuple[Spec, ...], A], tuple[Out, ...]]
    reference: Callable[..., Any] | None
    lowering: Lower[A] | str
    takes: Callable[[int, Spec], bool] = anything
    variants: tuple[str, ...] = ()
    attrs: Callable[..., A] = NoAttrs  # type: ignore[assignment]
    mutates: tuple[int, ...] = ()
    overwrites: tuple[int, ...] = ()
    element: Callable[[list[Any], A], Any] | None = None
    formula: Callable[[Any, list[Any], A], Any] | None = None
    host: Callable[[Form[A]], HostProgram | None] | None = None
    axes: Callable[[Form[A]], Axes] | None = None
    flops: Callable[[Form[A]], int] | None = None
    preferred: Callable[[Form[A], Caps], bool] | None = None
    narrower: bool = False
    fills: bool = True
    unread: Callable[[Form[A], frozenset[int]], Form[Any] | None] | None = None
    doc: str = ""

    def __post_init__(self) -> None:
        if self.name in _registry:
            raise ValueError(f"two ops are called {self.name!r}")
        _registry[self.name] = self

    def host_program(self, form: Form[A]) -> HostProgram:
        """What the CPU runs: it writes its results where they belong.

        An op that has a host program of its own uses that. Else the NumPy formula is called with
        widened inputs and rounded once, as it is stored; one that changes its operands moves them
        as they are stored.
        """
        program = self.host(form) if self.host is not None else None
        if program is not None:
            return program
        plain = {k: v for k, v in named(form.attrs).items() if k != "variant"}
        wide_in = [s.dtype for s in form.inputs]
        targets = [(s.shape, s.dtype) for s in form.outputs]
        reference = self.reference
        assert reference is not None, "an op without a formula has a host program of its own"

        def change(arrays: list[Array], outs: list[Array]) -> None:
            reference(*arrays, **plain)

        if self.mutates:
            return HostProgram(f"numpy:{self.name}", self.name, change, self.overwrites)

        def call(arrays: list[Array], outs: list[Array]) -> None:
            wide = [widen(a, d) for a, d in zip(arrays, wide_in, strict=True)]
            with np.errstate(all="ignore"):
                result = reference(*wide, **plain)
            results = result if isinstance(result, tuple) else (result,)
            for out, r, (shape, dtype) in zip(outs, results, targets, strict=True):
                np.copyto(out, narrow(np.broadcast_to(r, shape), dtype))

        return HostProgram(f"numpy:{self.name}", self.name, call)


_loading: threading.RLock = threading.RLock()  # held while a process forks: no half of a module
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_loading.acquire,
        after_in_parent=_loading.release,
        after_in_child=_loading.release,
    )


class Registry(dict[str, Op[Any]]):
    """Ops by name; the module of one loads when it is first asked for.

    Attributes:
        modules: where ops are that may not be loaded yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[str, str] = {}

    @uninterrupted
    def __missing__(self, name: str) -> Op[Any]:
        with _loading:
            import_module(self.modules[name])
        return dict.__getitem__(self, name)


_registry = Registry()


def register_later(modules: Mapping[str, str]) -> None:
    """Say where ops are: of each module, the names of its ops."""
    _registry.modules |= {name: m for m, names in modules.items() for name in names.split()}


def registry() -> dict[str, Op[Any]]:
    """Every op by name, in alphabetical order; all of their modules are loaded."""
    for module in set(_registry.modules.values()):
        import_module(module)
    return dict(sorted(_registry.items()))


get: Callable[[str], Op[Any]] = _registry.__getitem__  # the op of a name
