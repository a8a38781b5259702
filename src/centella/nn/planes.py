"""Quantised weights of a module: their names in a `state_dict`, and loading them.

"layers.0.weight.q4_0.stored" is the plane `stored` of the parameter "layers.0.weight" in q4_0;
"layers.0.weight.1.q6_k.stored" that of its second part, where parts have formats of their own. A
tensor of a GGUF file becomes the planes of its format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from centella.errors import DTypeError, ShapeError, WeightsError
from centella.ops.quant.table import FORMATS
from centella.specs import Shape
from centella.tensors.creation import asarray
from centella.tensors.qtensor import QTensor, Stacked
from centella.tensors.tensor import Tensor

if TYPE_CHECKING:
    from centella.nn.module import Module

F = TypeVar("F", bound=Callable[..., None])
Weight = Tensor | QTensor | Stacked
NAME = re.compile(
    r"(?P<path>.+?)(?:\.(?P<part>\d{1,4}))?"
    rf"(?:\.(?P<format>{'|'.join(FORMATS)})\.(?P<plane>\w+))?"
)


def named_planes(name: str, weight: QTensor | Stacked) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each plane, part after part."""
    if isinstance(weight, QTensor):
        for plane, tensor in zip(weight.format.planes, weight.planes, strict=True):
            yield f"{name}.{weight.format.name}.{plane.name}", tensor
        return
    for i, part in enumerate(weight.parts):
        if isinstance(part, QTensor):
            yield from named_planes(f"{name}.{i}", part)
        else:
            yield f"{name}.{i}", part


def with_planes(parameter: type[Any]) -> Callable[[F], F]:
    """Have a `load_parameters` set quantised weights first, from the planes among its tensors.

    Planes that are not whole, or stand for no `parameter` without data, are left to it: it names
    what is left over. On an error no weight is set.
    """

    def wrapped(load: F) -> F:
        @wraps(load)
        def filled(module: Module, tensors: Mapping[str, Any], **options: Any) -> None:
            owners, rest = dict(module.named_modules()), dict(tensors)
            ready: list[tuple[Module, str, Any, Weight]] = []
            for path, entries in _grouped(tensors).items():
                above, _, name = path.rpartition(".")
                empty: Any = vars(owners[above]).get(name) if above in owners else None
                if isinstance(empty, parameter) and _whole(entries):
                    weight = _weight(path, entries, tensors, empty.shape, options.get("device"))
                    ready.append((owners[above], name, empty, weight))
                    for entry in entries:
                        del rest[entry]
            for owner, name, _, weight in ready:
                setattr(owner, name, weight)
            try:
                load(module, rest, **options)
            except BaseException:
                for owner, name, empty, _ in ready:
                    setattr(owner, name, empty)
                raise

        return cast("F", filled)

    return wrapped


Entries = dict[str, tuple[int, str, str]]  # of a weight: by name its part, its format, its plane


def _grouped(tensors: Mapping[str, Any]) -> dict[str, Entries]:
    """What has the name of a plane or of a part, by the parameter's path."""
    entries: dict[str, Entries] = {}
    for name in tensors:
        match = NAME.fullmatch(name)
        if match and (match["part"] or match["format"]):
            entry = int(match["part"] or -1), match["format"] or "", match["plane"] or ""
            entries.setdefault(match["path"], {})[name] = entry
    return entries


def _by_part(entries: Entries) -> dict[int, dict[tuple[str, str], str]]:
    """Names by the part, then by format and plane."""
    parts: dict[int, dict[tuple[str, str], str]] = {}
    for name, (part, format, plane) in sorted(entries.items(), key=lambda item: item[1]):
        parts.setdefault(part, {})[format, plane] = name
    return parts


def _whole(entries: Entries) -> bool:
    """Whether every plane of every part is there, and nothing else."""
    parts = _by_part(entries)
    if [*parts] != [-1] and [*parts] != [*range(len(parts))]:
        return False
    return all([*names] == sorted(_keys(next(iter(names))[0])) for names in parts.values())


def _keys(format: str) -> list[tuple[str, str]]:
    """Format and plane of each plane of a part; of one that is a Tensor, neither."""
    return [(format, p.name) for p in FORMATS[format].planes] if format else [("", "")]


def _weight(
    path: str, entries: Entries, tensors: Mapping[str, Any], shape: Shape, device: Any
) -> Weight:
    """The weight on a device."""
    weights: list[Tensor | QTensor] = []
    try:
        for names in _by_part(entries).values():
            format = next(iter(names))[0]
            every = tuple(_resident(tensors[names[key]], device) for key in _keys(format))
            weights.append(QTensor(every, format) if format else every[0])
        weight = weights[0] if len(weights) == 1 else Stacked(tuple(weights))
        if weight.shape != (math.prod(shape[:-1]), shape[-1]):  # rows of all experts, of several
            raise ShapeError(
                f"{type(weight).__name__}: expected planes of {list(shape)}, got "
                f"{list(weight.shape)}"
            )
        return weight
    except (ShapeError, DTypeError) as error:
        raise WeightsError(f"load_parameters: {path}: {error}") from error


def _resident(plane: Any, device: Any) -> Tensor:
    """A plane on a device, from there, from the host or from a checkpoint."""
    if isinstance(plane, Tensor | np.ndarray):
        return asarray(plane, device=device)
    return asarray(plane.array, plane.dtype, device)
