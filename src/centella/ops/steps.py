"""Chains of ops inside one launch: what a chain is, and how a kernel evaluates it.

Values are numbered: first the operands of the launch, then what each step makes. A chain has at
most one op that works along rows (`norm`, `reduce`); all others are element-wise, or read operands
of the launch at rows that ids choose (`tables`). Each value that a step makes is rounded to its
dtype as a store and a load would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from centella import lang
from centella.dtypes import DType, dtype_of
from centella.emit.program import Kernel
from centella.lang.kernel_params import Signature, TensorParam
from centella.lang.memory import Argument
from centella.op.op import Form, get
from centella.ops import tables
from centella.ops.elements import (
    A,
    Number,
    index_of,
    number,
    numbered,
    offset_of,
    split_numbers,
)
from centella.ops.layout import broadcast_strides, merge
from centella.ops.rows import Values
from centella.ops.tables import LOOKUPS
from centella.specs import Shape, Spec, make_spec

Scalars = tuple[tuple[str, int | float], ...]
Types = tuple[tuple[str, str], ...]


class ChainStep(NamedTuple):
    """One op of a chain.

    Attributes:
        name: of the op.
        operands: 0 .. inputs - 1 are the chain's inputs, then come the steps before.
        attrs: in a `Chain` without the numbers, which ride with the launch.
        dtype: what it is rounded to.
    """

    name: str
    operands: tuple[int, ...]
    attrs: Any
    dtype: str

    @property
    def elements(self) -> tuple[int, ...]:
        """The operands whose elements it reads: not the ids that choose rows."""
        lookup = LOOKUPS.get(self.name)
        return self.operands if lookup is None else (self.operands[lookup.table],)


def step_of(name: str, operands: tuple[int, ...], to: str, /, **attrs: Any) -> ChainStep:
    """A step by the names of its op and attributes."""
    return ChainStep(name, operands, get(name).attrs(**attrs), to)


class FusedAttrs(Struct, frozen=True):
    """The ops in their order."""

    steps: tuple[ChainStep, ...]


class Chain(Struct, frozen=True):
    """Steps with the numbers that ride, and the layout of every value.

    Attributes:
        numbers: as "<index of the step>.<name>".
        specs: of the operands as they are, then of the steps as if each were stored.
    """

    steps: tuple[ChainStep, ...]
    numbers: tuple[Number, ...]
    specs: tuple[Spec, ...]

    @property
    def types(self) -> Types:
        """Of each number: what it rides as."""
        return tuple((n.name, n.type) for n in self.numbers)

    @property
    def scalars(self) -> Scalars:
        """The numbers as launch parameters."""
        return tuple((n.name, n.value) for n in self.numbers)

    @property
    def inputs(self) -> tuple[Spec, ...]:
        """The operands."""
        return self.specs[: -len(self.steps)]

    @property
    def seen(self) -> tuple[Spec, ...]:
        """The operands as they broadcast: of ids and tables see `tables`."""
        specs = list(self.inputs)
        for step in self.steps:
            if step.name in LOOKUPS:
                both = tables.seen(step.name, [self.specs[k] for k in step.operands])
                for k, spec in zip(step.operands, both, strict=True):
                    specs[k] = spec
        return tuple(specs)

    @property
    def at(self) -> int:
        """The step that works along rows."""
        along = (i for i, s in enumerate(self.steps) if get(s.name).element is None)
        return next(i for i in along if self.steps[i].name not in LOOKUPS)

    @property
    def sources(self) -> tuple[Spec, ...]:
        """Operands of the step that works along rows."""
        return tuple(self.specs[k] for k in self.steps[self.at].operands)

    @property
    def row_result(self) -> Spec:
        """The result of the step that works along rows."""
        return self.specs[len(self.inputs) + self.at]

    def reads(self, *values: int, stop: int = -1) -> set[int]:
        """The operands that values depend on, not counting what value `stop` depends on."""
        first = len(self.inputs)
        numbers_read: set[int] = set()
        waiting = [v for v in values if v != stop]
        while waiting:
            value = waiting.pop()
            if value < first:
                numbers_read.add(value)
            else:
                waiting += [k for k in self.steps[value - first].operands if k != stop]
        return numbers_read


def chain_of(inputs: tuple[Spec, ...], attrs: FusedAttrs, row_alignment: int) -> Chain:
    """The chain that attributes describe, on a device that aligns rows so."""
    steps: list[ChainStep] = []
    numbers: list[Number] = []
    specs = list(inputs)
    for index, step in enumerate(attrs.steps):
        operands = tuple(specs[k] for k in step.operands)
        riding, rest = numbers_of(index, step.name, step.attrs, operands)
        steps.append(step._replace(attrs=rest))
        numbers += riding
        ((shape, kind),) = get(step.name).rule(operands, step.attrs)
        specs.append(make_spec(shape, kind, row_alignment))
    return Chain(tuple(steps), tuple(numbers), tuple(specs))


def numbers_of(
    index: int, name: str, attrs: A, operands: Sequence[Spec]
) -> tuple[tuple[Number, ...], A]:
    """What rides of the step with an index, which the names begin with, and the attributes left."""
    if name in LOOKUPS:
        numbers, rest = tables.numbers(name, operands), attrs
    else:
        numbers, rest = split_numbers(attrs, operands[-1].dtype)
    return tuple(n._replace(name=f"{index}.{n.name}") for n in numbers), rest


def single(form: Form[Any]) -> Chain:
    """One op as a chain of its own."""
    numbers, attrs = numbers_of(0, form.op.name, form.attrs, form.inputs)
    operands = tuple(range(len(form.inputs)))
    step = ChainStep(form.op.name, operands, attrs, form.outputs[0].dtype.name)
    return Chain((step,), numbers, (*form.inputs, *form.outputs))


# -- in a kernel ----------------------------------------------------------------------------------


def computed(step: ChainStep, index: int, operands: list[Any], numbers: Mapping[str, Any]) -> Any:
    """What a step makes of one element of each operand; of a table, or what stands for none."""
    if step.name in LOOKUPS:
        (value,) = operands
        return lang.select(numbers[f"{index}.inside"], value, tables.missing(dtype_of(step.dtype)))
    op = get(step.name)
    assert op.element is not None, "only element-wise steps are computed element by element"
    names = ((n, f"{index}.{n}") for n in step.attrs.__struct_fields__)
    attrs = replace(step.attrs, **{n: numbers[key] for n, key in names if key in numbers})
    return lang.stored(op.element(operands, attrs), dtype_of(step.dtype))


class Elements:
    """Values of a chain at neighbouring elements, each loaded or computed when it is first asked.

    Args:
        read: the elements of an operand.
        inputs: how many operands there are.
    """

    def __init__(
        self, steps: Sequence[ChainStep], numbers: Mapping[str, Any], inputs: int,
        read: Callable[[int], Values],
    ) -> None:  # fmt: skip
        self._steps, self._numbers, self._inputs, self._read = steps, numbers, inputs, read
        self._have: dict[int, Values] = {}

    def __getitem__(self, value: int) -> Values:
        values = self._have.get(value)
        if values is None:
            values = self._have[value] = self._computed(value)
        return values

    def _computed(self, value: int) -> Values:
        index = value - self._inputs
        if index < 0:
            return self._read(value)
        step = self._steps[index]
        columns = [self[k] for k in step.elements]
        lanes = zip(*columns, strict=True)
        return [computed(step, index, list(lane), self._numbers) for lane in lanes]

    def put(self, index: int, values: Values) -> None:
        """What a step made that is not element-wise: rounded to its dtype."""
        dtype = dtype_of(self._steps[index].dtype)
        self._have[self._inputs + index] = [lang.stored(v, dtype) for v in values]


def traced_numbers(types: Types) -> dict[str, Any]:
    """The numbers that ride with the launch."""
    return {name: number(name, type_) for name, type_ in types}


def starts_of(row: Any, rank: int, tensors: int) -> list[Any]:
    """The element at which a row begins in each tensor."""
    index = index_of(row, "n", rank)
    return [offset_of(index, f"s{k}.") for k in range(tensors)]


# -- the rows of operands that broadcast ----------------------------------------------------------


class RowSpace(Struct, frozen=True):
    """How operands are read along the rows of a shape.

    Attributes:
        rank: of the merged dimensions that number the rows.
        modes: of each operand, as `elements.load_elements` takes them.
        scalars: launch parameters.
    """

    rank: int
    modes: tuple[str, ...]
    scalars: Scalars


def row_space(
    shape: Shape, operands: Sequence[Spec], along: Sequence[bool], width: int, out: Spec | None
) -> RowSpace:
    """The rows of a shape.

    Args:
        along: of each operand, whether it broadcasts to the shape; else it has an element a row.
        width: elements that a thread takes at a time.
        out: a result with such rows, numbered after the operands.
    """
    lead, columns = shape[:-1], shape[-1]
    steps = [
        broadcast_strides(s, shape) if a else (*broadcast_strides(s, lead), 0)
        for s, a in zip(operands, along, strict=True)
    ]
    ends = [*steps, *([] if out is None else [broadcast_strides(out, shape)])]
    sizes, merged = merge(lead, tuple(s[:-1] for s in ends))
    modes = tuple(_mode(s, step, width, columns) for s, step in zip(operands, steps, strict=True))
    scalars = numbered({"n": sizes, **{f"s{k}.": outer for k, outer in enumerate(merged)}})
    scalars.update({f"step{k}": s[-1] for k, s in enumerate(steps)})
    return RowSpace(len(sizes), modes, tuple(scalars.items()))


def _mode(spec: Spec, steps: Shape, width: int, columns: int) -> str:
    """Chunks where a row's end allows: a wider item than its neighbours' has less padding."""
    dtype = spec.dtype
    if steps[-1] == 0:
        return "one"
    whole = width == dtype.per_chunk or (width % dtype.per_chunk == 0 and columns % width == 0)
    even = all(s * dtype.itemsize % 16 == 0 for s in steps[:-1])
    return "chunk" if whole and even and spec.aligned and steps[-1] == 1 else "any"


# -- how much a kernel holds ----------------------------------------------------------------------


def _one(*, step: ChainStep, types: Types, y: Argument, **inputs: Argument) -> None:
    index, per_word = lang.global_id(), y.dtype.per_word
    operands = [inputs[f"x{k}"][index] for k in range(len(inputs))]
    value = computed(step, 0, operands, traced_numbers(types))
    y.store(index * per_word, [value] * per_word)


_probe: Kernel = Kernel(_one, workgroup=64, name="weigh", signature=Signature((), (), ()))


@lru_cache(maxsize=1024)
def weight(step: ChainStep, types: Types, dtypes: tuple[DType, ...]) -> int:
    """Statements of a step for one element of operands of these dtypes, as a trace counts them."""
    out = dtype_of(step.dtype)
    params = [(f"x{k}", TensorParam("in", None, 1)) for k in range(len(dtypes))]
    signature = Signature((*params, ("y", TensorParam("out", None, 1))), (), ())
    unit, constants = (True,) * (len(dtypes) + 1), (("step", step), ("types", types))
    return len(_probe.specialise((*dtypes, out), unit, constants, signature=signature).body)
