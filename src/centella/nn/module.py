"""`Module`: attributes are the parameter tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from centella.dtypes import Array
from centella.errors import ContractError
from centella.nn.checkpoint import fill
from centella.nn.planes import named_planes, with_planes
from centella.nn.stored import Stored, listed
from centella.runtime.device import Device
from centella.specs import Shape
from centella.tensors.display import as_tree
from centella.tensors.hints import layer_getattr
from centella.tensors.qtensor import QTensor, Stacked
from centella.tensors.tensor import Tensor


class _NotLoadedError(ContractError):
    """A parameter was used that has no data; each module on the way out names its path in it."""

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        super().__init__(self.text("a parameter"))

    def text(self, name: str) -> str:
        """What is wrong with the parameter of a name."""
        shape = list(self.parameter.shape)
        return f"{name} of shape {shape} has no data yet: call load_parameters"

    def name_in(self, module: Module) -> None:
        """Name its path in a module that it is a part of."""
        for path, _, _, value in _walk(module):
            if value is self.parameter:
                self.args = (self.text(f"{type(module).__name__}: parameter {path}"),)

    def __reduce__(self) -> tuple[Any, ...]:
        return ContractError, self.args


class Parameter(Struct, frozen=True):
    """Stands where a tensor will be once it is loaded; used before, it raises ContractError.

    Attributes:
        shape: what the tensor's will be.
    """

    shape: Shape

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _NotLoadedError(self)


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
        """What the module computes; a subclass says how.

        Raises:
            NotImplementedError: it does not.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: expected a method forward(...) that gives a Tensor; calling a "
            f"module calls it"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """`forward`."""
        try:
            return self.forward(*args, **kwargs)
        except _NotLoadedError as error:
            error.name_in(self)
            raise

    @property
    def device(self) -> Device:
        """Where its parameters are."""
        for _, tensor in self.named_parameters():
            return tensor.device
        raise ContractError(f"{type(self).__name__}: no parameter has data yet")

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """Path and module, itself ("") and all below it: ("layers.0.dense", ...)."""
        yield "", self
        for name, value in _items(self):
            if isinstance(value, Module):
                for path, module in value.named_modules():
                    yield f"{name}.{path}".removesuffix("."), module

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Path and tensor of each loaded parameter: ("layers.0.dense.weight", ...)."""
        for path, _, _, value in _walk(self):
            if isinstance(value, Tensor):
                yield path, value

    def state_dict(self) -> dict[str, Tensor]:
        """Each parameter's tensor by its path: what `load_parameters` of a module like it takes.

        Raises:
            ContractError: parameters that have no data yet.
        """
        missing = [path for path, _, _, value in _walk(self) if isinstance(value, Parameter)]
        if missing:
            raise ContractError(f"state_dict: no data yet: {listed(missing)}; call load_parameters")
        return dict(self.named_parameters())

    def __repr__(self) -> str:
        own, children = [], []
        for name, value in _items(self):
            if isinstance(value, Module):
                children.append((name, repr(value)))
            elif isinstance(value, Tensor):
                own.append(f"{name} {list(value.shape)} {value.dtype.name}")
            elif isinstance(value, Parameter):
                own.append(f"{name} {list(value.shape)} without data")
        return as_tree(type(self).__name__, own, children)

    if not TYPE_CHECKING:  # which is to say itself what a Module has not

        def __getattr__(self, name: str) -> Any:
            return layer_getattr(self, name)

    def rename(self, name: str) -> str:
        """The parameter path that a checkpoint's name means."""
        return name

    def sources(self, path: str, name: str, shape: Shape) -> tuple[tuple[str, Shape], ...]:
        """Checkpoint tensors, stacked along axis 0, that make parameter `name` of this module.

        A part without a name is zeros.
        """
        return ((f"{path}{name}", shape),)

    def arranged(self, name: str, data: Array) -> Array:
        """A parameter's data as the module keeps it."""
        return data

    def keeps_order(self, name: str) -> bool:
        """Whether `arranged` changes no more than the shape, so that rows may be read in parts."""
        return type(self).arranged is Module.arranged

    def takes_planes(self, name: str) -> bool:
        """Whether parameter `name` may be a quantised weight; else one is loaded as floats."""
        return False

    @with_planes(Parameter)
    def load_parameters(
        self, tensors: Mapping[str, Stored | Array | Tensor], *,
        device: str | Device | None = None, dtype: Any = None, vector_dtype: Any = None,
        quantize: str | None = None, origin: str = "load_parameters",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        """Give every parameter its tensor, sent now; on an error no parameter is set.

        Tensors of a checkpoint are read from its files one after the other, once all names, shapes
        and dtypes fit. A large tensor is an upload of its own, of which a few MB are on the host at
        a time; small ones are packed into one. On the CPU large tensors of a checkpoint stay in the
        memory that they were read into.

        Args:
            tensors: by checkpoint name: NumPy arrays, or what `weights.open_checkpoint` gives; or
                by path, in the parameter's own shape: Tensors, as `state_dict` gives them, which
                are shared where they need not move, or arrays of theirs. All the planes of a
                quantised weight make a QTensor, which keeps its format.
            device: where to; default: the default device.
            dtype: of the parameters on the device; None keeps each tensor's own.
            vector_dtype: of those of rank 1 (biases, norms); None: as `dtype`.
            quantize: "q8_0" or "q4_0": weights of `Linear` and `Embedding` are quantised on the
                device, from the dtype that the tensors have, one after the other.
            origin: begins the text of an error.
            progress: `progress(done, total)` is called after each parameter, with bytes on the
                device.

        Raises:
            WeightsError: tensors that are missing, left over or of parameters that have data (all
                lists), or of another shape or dtype; to quantise, rows of no multiple of 32, or
                values whose factors float16 does not hold.
            DTypeError: a `dtype` that is no float. ShapeError: another `quantize`.
            OutOfMemoryError, LimitError: the device has no room, before anything is sent.
        """
        fill(
            self, list(_walk(self)), tensors, device=device, dtype=dtype,
            vector_dtype=vector_dtype, quantize=quantize, origin=origin, progress=progress,
        )  # fmt: skip


def _items(module: Module) -> Iterator[tuple[str, Any]]:
    """Attributes by name; of a list, tuple or dict the modules, as "name.0" or "name.key"."""
    for name, value in list(vars(module).items()):
        if isinstance(value, list | tuple | dict):
            yield from modules_in(value, name)
        elif isinstance(value, QTensor | Stacked):
            yield from named_planes(name, value)
        else:
            yield name, value


def modules_in(
    value: list[Any] | tuple[Any, ...] | dict[Any, Any], path: str = ""
) -> Iterator[tuple[str, Module]]:
    """Path and module of each module in a list, tuple or dict, and in those that it holds."""
    for key, entry in list(value.items()) if isinstance(value, dict) else enumerate(value):
        if isinstance(entry, Module):
            yield f"{path}.{key}", entry
        elif isinstance(entry, list | tuple | dict):
            yield from modules_in(entry, f"{path}.{key}")


def _walk(module: Module, path: str = "") -> Iterator[tuple[str, Module, str, Any]]:
    """(path, owner, attribute, value) of each parameter, loaded or not, in order of attributes."""
    for name, value in _items(module):
        if isinstance(value, Tensor | Parameter):
            yield f"{path}{name}", module, name, value
        elif isinstance(value, Module):
            yield from _walk(value, f"{path}{name}.")
