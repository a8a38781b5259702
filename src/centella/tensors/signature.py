"""How a captured function is called: tensors and arrays taken out, the rest as a signature.

Arguments and results may be nested tuples, lists and dicts. Equal signatures are served by one
capture: the containers, the Python numbers in them, and shape and dtype of each leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from centella.dtypes import Array, from_host_array
from centella.emit.program import exact
from centella.errors import ContractError, DeviceError, DTypeError
from centella.record.recording import innermost
from centella.runtime.device import Device, current_device
from centella.runtime.device import device as open_device
from centella.specs import Spec
from centella.tensors.tensor import Tensor

Leaf = Tensor | Array
LEAVES = (Tensor, np.ndarray)


class _Slot:
    """Where a leaf stood in nested containers."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def flatten(value: Any, leaves: list[Any], kinds: tuple[type, ...]) -> Any:
    """Nested tuples, lists and dicts with their leaves taken out, in order."""
    if isinstance(value, kinds):
        leaves.append(value)
        return _Slot(len(leaves) - 1)
    if isinstance(value, (tuple, list)):
        parts = [flatten(v, leaves, kinds) for v in value]
        if isinstance(value, list):
            return parts
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, dict):
        return {k: flatten(v, leaves, kinds) for k, v in value.items()}
    return value


def fill(shape: Any, leaves: Sequence[Any]) -> Any:
    """Undo `flatten` with other leaves."""
    if isinstance(shape, _Slot):
        return leaves[shape.index]
    if isinstance(shape, list):
        return [fill(v, leaves) for v in shape]
    if isinstance(shape, tuple):
        parts = [fill(v, leaves) for v in shape]
        return type(shape)(*parts) if hasattr(shape, "_fields") else tuple(parts)
    if isinstance(shape, dict):
        return {k: fill(v, leaves) for k, v in shape.items()}
    return shape


def _key(value: Any, leaves: list[Any]) -> Any:
    """An argument as a dictionary key, its leaves taken out, in the order of `flatten`."""
    kind = type(value)
    if value is None or kind is str:
        return value
    if kind is bool or kind is int:
        return kind, value
    if isinstance(value, LEAVES):
        leaves.append(value)
        return _Slot
    if isinstance(value, (tuple, list)):
        return kind, tuple([_key(v, leaves) for v in value])
    if isinstance(value, dict):
        return dict, tuple([(k, _key(v, leaves)) for k, v in value.items()])
    try:
        hash(value)
    except TypeError as error:
        raise DTypeError(
            f"jit: expected tensors, arrays, numbers and containers of them, got {kind.__name__}"
        ) from error
    return exact(value)


class CallArguments:
    """The arguments of a call: tensors and host arrays taken out, the rest as a key.

    Attributes:
        leaves: arrays as what holds the bytes of their storage type.
        signature: what a capture is for; the specs of the leaves come after the rest.
    """

    __slots__ = ("_arguments", "device", "leaves", "signature")

    def __init__(
        self, name: str, device: str | Device | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        leaves: list[Leaf] = []
        key: tuple[Any, ...] = tuple([_key(value, leaves) for value in args])
        if kwargs:
            key = key, _key(kwargs, leaves)
        self._arguments = (args, kwargs)
        self.device: Device = _device_of(leaves) if device is None else open_device(device)
        self.leaves: list[Leaf] = leaves
        spec, signature = self.device.storage.spec, []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._check_device(name, leaf)
                signature.append(spec(leaf.shape, leaf.dtype))
            else:
                leaves[index], kind = from_host_array(name, leaf, None)
                signature.append(spec(leaves[index].shape, kind))
        self.signature: tuple[Any, ...] = (key, *signature)

    def _check_device(self, name: str, leaf: Tensor) -> None:
        if leaf.device is not self.device:
            raise DeviceError(
                f"{name}: expected tensors on {self.device.name}, got one on {leaf.device.name}; "
                f"move it with .to(device)"
            )

    def filled(self, leaves: Sequence[Any]) -> Any:
        """(args, kwargs) with other leaves."""
        return fill(flatten(self._arguments, [], LEAVES), leaves)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """How each leaf lies on the device."""
        return self.signature[1:]

    @property
    def capturing(self) -> bool:
        """Whether a function is being captured on the device."""
        inside = innermost(self.device)
        return inside is not None and inside.host_updates is not None

    def check_readable(self, name: str) -> None:
        """Raise where results cannot be read.

        Raises:
            ContractError: a function is being captured on the device.
        """
        if self.capturing:
            raise ContractError(f"{name}: read while a function is captured; return it")

    def __str__(self) -> str:
        said = ", ".join(f"{s.dtype.name} {list(s.shape)}" for s in self.specs)
        return f"({said})" if said else "(no tensors)"


def _device_of(leaves: Sequence[Leaf]) -> Device:
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            return leaf.device
    return current_device()
