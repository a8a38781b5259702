"""Quantised weights of a module: the names of their planes in a `state_dict`, and loading those.

"layers.0.weight.q4_0.stored" is the plane `stored` of the parameter "layers.0.weight" in q4_0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from centella.errors import DTypeError, ShapeError, WeightsError
from centella.ops.quant.table import FORMATS
from centella.tensors.creation import asarray
from centella.tensors.qtensor import QTensor
from centella.tensors.tensor import Tensor

if TYPE_CHECKING:
    from centella.nn.module import Module

F = TypeVar("F", bound=Callable[..., None])


def named_planes(name: str, weight: QTensor) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each plane."""
    for plane, tensor in zip(weight.format.planes, weight.planes, strict=True):
        yield f"{name}.{weight.format.name}.{plane.name}", tensor


def with_planes(parameter: type[Any]) -> Callable[[F], F]:
    """Have a `load_parameters` set quantised weights first, from the planes among its tensors.

    Planes that are not whole, or stand for no `parameter` without data, are left to it: it names
    what is left over. On an error no weight is set.
    """

    def wrapped(load: F) -> F:
        @wraps(load)
        def filled(module: Module, tensors: Mapping[str, Any], **options: Any) -> None:
            owners, rest = dict(module.named_modules()), dict(tensors)
            ready: list[tuple[Module, str, Any, QTensor]] = []
            for (path, format), planes in _grouped(tensors).items():
                above, _, name = path.rpartition(".")
                empty: Any = vars(owners[above]).get(name) if above in owners else None
                if isinstance(empty, parameter) and len(planes) == len(FORMATS[format].planes):
                    weight = _weight(path, format, planes, empty.shape, options.get("device"))
                    ready.append((owners[above], name, empty, weight))
                    for plane in planes:
                        del rest[f"{path}.{format}.{plane}"]
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


def _grouped(tensors: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """What has the name of a plane: by the parameter's path and the format, then by the plane."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        path, _, format = path.rpartition(".")
        if format in FORMATS and any(p.name == last for p in FORMATS[format].planes):
            found.setdefault((path, format), {})[last] = tensor
    return found


def _weight(
    path: str, format: str, planes: Mapping[str, Any], shape: tuple[int, ...], device: Any
) -> QTensor:
    """The weight on a device."""
    try:
        every = (_resident(planes[p.name], device) for p in FORMATS[format].planes)
        return QTensor(tuple(every), format, shape)
    except (ShapeError, DTypeError) as error:
        raise WeightsError(f"load_parameters: {path}: {error}") from error


def _resident(plane: Any, device: Any) -> Tensor:
    """A plane on a device, from there, from the host or from a checkpoint."""
    if isinstance(plane, Tensor | np.ndarray):
        return asarray(plane, device=device)
    return asarray(plane.array, plane.dtype, device)
