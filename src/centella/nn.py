"""Modules: attributes are the parameter tree.

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            self.up = nn.Linear(384, 1536)
            self.down = nn.Linear(1536, 384)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x, activation="gelu"), residual=x)

Its parameters are `up.weight`, `up.bias`, `down.weight`, `down.bias`. A module is made without
data; `load_parameters` takes a checkpoint's tensors, each by the path of its attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import numpy as np

from centella import functional
from centella.device import Device
from centella.device import device as open_device
from centella.dtypes import DType, dtype_of, from_numpy, narrow, widen
from centella.errors import ContractError, WeightsError
from centella.specs import Shape
from centella.tensor import Tensor, asarray

Array = np.ndarray[Any, Any]
LISTED = 20  # names that an error shows


class Stored(Protocol):
    """A tensor of a checkpoint: its storage type (None: one that no device stores) and bytes."""

    @property
    def dtype(self) -> DType | None:
        """What the bytes mean."""

    @property
    def shape(self) -> Shape:
        """Extents."""

    @property
    def array(self) -> Array:
        """The data on the host (bf16 as uint16)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Stands where a tensor will be once it is loaded."""

    shape: Shape

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ContractError(
            f"a parameter of shape {list(self.shape)} has no data yet: call load_parameters"
        )


def parameter(*shape: int) -> Any:
    """Declare a parameter of a shape; `load_parameters` puts the tensor in its place."""
    return Parameter(shape)


class Module:
    """Base of layers and models; `module(...)` is `module.forward(...)`.

    Attributes:
        ignored: patterns of checkpoint tensors that the class knowingly does without.
    """

    ignored: tuple[str, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the module computes."""
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """`forward`."""
        return self.forward(*args, **kwargs)

    @property
    def device(self) -> Device:
        """Where its parameters are."""
        for _, tensor in self.named_parameters():
            return tensor.device
        raise ContractError(f"{type(self).__name__}: no parameter has data yet")

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Path and tensor of each loaded parameter: ("layers.0.dense.weight", ...)."""
        for path, _, _, value in _walk(self, ""):
            if isinstance(value, Tensor):
                yield path, value

    def rename(self, name: str) -> str:
        """The parameter path that a checkpoint's name means."""
        return name

    def sources(self, path: str, name: str, shape: Shape) -> tuple[tuple[str, Shape], ...]:
        """Checkpoint tensors, stacked along axis 0, that make parameter `name` of this module."""
        return ((f"{path}{name}", shape),)

    def load_parameters(
        self,
        tensors: Mapping[str, Stored | Array],
        *,
        device: str | Device | None = None,
        dtype: Any = None,
        vector_dtype: Any = None,
        origin: str = "load_parameters",
    ) -> None:
        """Give every parameter its tensor, each sent in one upload; nothing is sent on an error.

        Args:
            tensors: by checkpoint name: NumPy arrays, or what `weights.open_checkpoint` gives.
            device: where to; default: the default device.
            dtype: of the parameters on the device; None keeps each tensor's own.
            vector_dtype: of those of rank 1 (biases, norms); None: as `dtype`.
            origin: begins the text of an error.

        Raises:
            WeightsError: tensors that are missing or left over (both lists), or of another shape
                or dtype.
        """
        stored = _by_path(self, tensors, origin)
        wanted = list(_wanted(self))
        names = [source for w in wanted for source, _ in w.parts]
        _check_names(names, stored, self.ignored, origin)
        ready: list[tuple[_Wanted, list[tuple[Array, DType]], DType]] = []
        for w in wanted:
            parts = [_checked(origin, *stored[source], shape) for source, shape in w.parts]
            vector = len(w.parts[0][1]) == 1 and vector_dtype is not None
            asked = vector_dtype if vector else dtype
            kind = parts[0][1] if asked is None else dtype_of(asked)
            ready.append((w, parts, kind))
        where = open_device(device)
        for w, parts, kind in ready:
            setattr(w.owner, w.name, asarray(_host(parts, kind), dtype=kind, device=where))
            where.flush_thread()


class Linear(Module):
    """y = x W^T + b, with an activation and a residual in the same launch.

    Attributes:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        stacks: Mapping[str, int] | None = None,
    ) -> None:
        """`stacks`: checkpoint layers beside this one and their rows, stacked to make it."""
        self.weight = parameter(out_features, in_features)
        self.bias = parameter(out_features) if bias else None
        self.stacks = dict(stacks or {})

    def sources(self, path: str, name: str, shape: Shape) -> tuple[tuple[str, Shape], ...]:
        """Its own tensor, or those of the layers that it stacks."""
        if not self.stacks:
            return super().sources(path, name, shape)
        beside = path.rstrip(".").rpartition(".")[0]
        lead = f"{beside}." if beside else ""
        return tuple((f"{lead}{s}.{name}", (rows, *shape[1:])) for s, rows in self.stacks.items())

    def forward(
        self, x: Tensor, activation: str | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """f(x W^T + b) + residual: x [..., in_features] to [..., out_features]."""
        return functional.linear(
            x, self.weight, self.bias, activation=activation, residual=residual
        )


class LayerNorm(Module):
    """Layer normalisation over the last dimension (Ba et al. 2016)."""

    weight: Tensor
    bias: Tensor

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        self.weight = parameter(features)
        self.bias = parameter(features)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias: [..., features] to the same."""
        return functional.layer_norm(x, self.weight, self.bias, self.eps)


class Embedding(Module):
    """A table of vectors.

    Attributes:
        weight: [rows, features].
    """

    weight: Tensor

    def __init__(self, rows: int, features: int) -> None:
        self.weight = parameter(rows, features)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows of the table: ids [...] i32 to [..., features], in the table's dtype."""
        return functional.embedding(ids, self.weight)


def _walk(module: Module, path: str) -> Iterator[tuple[str, Module, str, Any]]:
    """(path, owner, attribute, value) of each parameter, loaded or not, in order of attributes."""
    for name, value in list(vars(module).items()):
        if isinstance(value, Tensor | Parameter):
            yield f"{path}{name}", module, name, value
        elif isinstance(value, Module):
            yield from _walk(value, f"{path}{name}.")
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, Module):
                    yield from _walk(item, f"{path}{name}.{i}.")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A parameter to load: whose, which, and the checkpoint tensors that make it."""

    owner: Module
    name: str
    parts: tuple[tuple[str, Shape], ...]


def _wanted(module: Module) -> Iterator[_Wanted]:
    for path, owner, name, value in _walk(module, ""):
        if isinstance(value, Parameter):
            yield _Wanted(owner, name, owner.sources(path.removesuffix(name), name, value.shape))


@dataclass(frozen=True, slots=True)
class _Plain:
    """A NumPy array as a checkpoint's tensor."""

    array: Array

    @property
    def dtype(self) -> DType:
        return from_numpy(self.array.dtype)

    @property
    def shape(self) -> Shape:
        shape: Shape = self.array.shape
        return shape


def _by_path(
    module: Module, tensors: Mapping[str, Stored | Array], origin: str
) -> dict[str, tuple[str, Stored]]:
    """Checkpoint tensors, and their own names, by the parameter path that they mean."""
    found: dict[str, tuple[str, Stored]] = {}
    for name, tensor in tensors.items():
        path = module.rename(name)
        if path in found:
            raise WeightsError(f"{origin}: {found[path][0]} and {name} both stand for {path}")
        found[path] = name, _Plain(tensor) if isinstance(tensor, np.ndarray) else tensor
    return found


def _check_names(
    wanted: list[str],
    stored: Mapping[str, tuple[str, Stored]],
    ignored: tuple[str, ...],
    origin: str,
) -> None:
    missing = [name for name in wanted if name not in stored]
    left = [
        own
        for path, (own, _) in stored.items()
        if path not in set(wanted) and not any(fnmatchcase(path, p) for p in ignored)
    ]
    if missing or left:
        raise WeightsError(f"{origin}: missing: {_listed(missing)}; left over: {_listed(left)}")


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - LISTED} more" if len(every) > LISTED else ""
    return ", ".join(every[:LISTED]) + more or "none"


def _checked(origin: str, name: str, tensor: Stored, shape: Shape) -> tuple[Array, DType]:
    """The data of a float tensor of this shape, and its dtype."""
    if tensor.shape != shape:
        raise WeightsError(
            f"{origin}: tensor {name}: expected shape {list(shape)}, got {list(tensor.shape)}"
        )
    if tensor.dtype is None or not tensor.dtype.is_float:
        got = tensor.array.dtype if tensor.dtype is None else tensor.dtype.name
        raise WeightsError(f"{origin}: tensor {name}: expected f32, f16 or bf16, got {got}")
    return tensor.array, tensor.dtype


def _host(parts: list[tuple[Array, DType]], kind: DType) -> Array:
    """The parts stacked, as host bytes of `kind`; one part of that dtype is not copied."""
    arrays = [a if own is kind else narrow(widen(a, own), kind) for a, own in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
