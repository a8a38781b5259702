"""`Module`: attributes are the parameter tree; and how checkpoints fill it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from centella.dtypes import DType, dtype_of, f32
from centella.errors import ContractError, DTypeError, WeightsError
from centella.nn.planes import named_planes, with_planes
from centella.nn.stored import Part, Plain, Stored, checked, from_blocks, host_data, listed, shown
from centella.nn.stored import zeros as zero_part
from centella.runtime.device import Device
from centella.runtime.device import device as open_device
from centella.specs import Shape
from centella.tensors.arguments import one_of
from centella.tensors.display import as_tree
from centella.tensors.hints import layer_getattr
from centella.tensors.qtensor import QTensor, Stacked
from centella.tensors.quantizers import BLOCK, QUANTIZERS, all_quantized
from centella.tensors.tensor import Tensor, fetch, upload

Array = np.ndarray[Any, Any]


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
        for path, _, _, value in _walk(module, ""):
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
        yield from _modules(self, "")

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Path and tensor of each loaded parameter: ("layers.0.dense.weight", ...)."""
        for path, _, _, value in _walk(self, ""):
            if isinstance(value, Tensor):
                yield path, value

    def state_dict(self) -> dict[str, Tensor]:
        """Each parameter's tensor by its path: what `load_parameters` of a module like it takes.

        Raises:
            ContractError: parameters that have no data yet.
        """
        missing = [w.path for w in _wanted(self)]
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
        """A parameter's data in the order that the module keeps it in."""
        return data

    def takes_planes(self, name: str) -> bool:
        """Whether parameter `name` may be a quantised weight; else one is loaded as floats."""
        return False

    @with_planes(Parameter)
    def load_parameters(
        self,
        tensors: Mapping[str, Stored | Array | Tensor],
        *,
        device: str | Device | None = None,
        dtype: Any = None,
        vector_dtype: Any = None,
        quantize: str | None = None,
        origin: str = "load_parameters",
    ) -> None:
        """Give every parameter its tensor, sent now; on an error no parameter is set.

        Tensors of a checkpoint are read from its files one after the other, once all names, shapes
        and dtypes fit. A large tensor is an upload of its own, small ones are packed into one. On
        the CPU large tensors of a checkpoint stay in the memory that they were read into.

        Args:
            tensors: by checkpoint name: NumPy arrays, or what `weights.open_checkpoint` gives; by
                path: Tensors, as `state_dict` gives them, which are shared where they need not
                move. All the planes of a quantised weight make a QTensor, which keeps its format.
            device: where to; default: the default device.
            dtype: of the parameters on the device; None keeps each tensor's own.
            vector_dtype: of those of rank 1 (biases, norms); None: as `dtype`.
            quantize: "q8_0" or "q4_0": weights of `Linear` and `Embedding` are quantised on the
                device, from the dtype that the tensors have, one after the other.
            origin: begins the text of an error.

        Raises:
            WeightsError: tensors that are missing, left over or of parameters that have data (all
                lists), or of another shape or dtype; to quantise, rows of no multiple of 32, or
                values whose factors float16 does not hold.
            DTypeError: a `dtype` that is no float. ShapeError: another `quantize`.
        """
        stored = _by_path(self, tensors, origin)
        wanted = [w.given_as(stored) for w in _wanted(self)]
        names = [source for w in wanted for source, _ in w.parts if source]
        _check_names(names, stored, self.ignored, _loaded(self), origin)
        dtypes = _Dtypes(dtype, vector_dtype, quantize, origin)
        ready = [dtypes.ready(w, stored) for w in wanted]
        where = open_device(device)
        loaded: list[tuple[_Wanted, Tensor | QTensor | Stacked]] = []
        infinite: dict[str, list[Tensor]] = {}
        for w, parts, kind in ready:  # each is read now
            stays = not any(isinstance(stored[s][1], Plain) for s, _ in w.parts if s)
            made = _sent(w, parts, kind, where, stays)
            if quantize is not None and dtypes.quantizes(w):
                name = f"{origin}: {w.path}"
                made, infinite[w.path] = all_quantized(made, quantize, name)
                where.recorder.flush()  # so the whole weight is freed before the next is sent
            loaded.append((w, made))
        if infinite:
            _check_finite(infinite, origin)
        for w, tensor in loaded:
            setattr(w.owner, w.name, tensor)
        where.recorder.flush()


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


def _modules(module: Module, path: str) -> Iterator[tuple[str, Module]]:
    """Path and module, itself and all below it, in order of attributes."""
    yield path.removesuffix("."), module
    for name, value in _items(module):
        if isinstance(value, Module):
            yield from _modules(value, f"{path}{name}.")


def _walk(module: Module, path: str) -> Iterator[tuple[str, Module, str, Any]]:
    """(path, owner, attribute, value) of each parameter, loaded or not, in order of attributes."""
    for name, value in _items(module):
        if isinstance(value, Tensor | Parameter):
            yield f"{path}{name}", module, name, value
        elif isinstance(value, Module):
            yield from _walk(value, f"{path}{name}.")


class _Wanted(Struct, frozen=True):
    """A parameter to load: whose, which, and the checkpoint tensors that make it."""

    owner: Module
    name: str
    path: str
    shape: Shape
    parts: tuple[tuple[str, Shape], ...]

    def given_as(self, stored: Mapping[str, tuple[str, Stored | Tensor]]) -> _Wanted:
        """The same, made of the Tensor that stands for it by its own path, if one does."""
        _, given = stored.get(self.path, ("", None))
        if not isinstance(given, Tensor):
            return self
        return replace(self, parts=((self.path, self.shape),))


class _Dtypes(Struct, frozen=True):
    """Arguments of `load_parameters`: what parameters become."""

    dtype: Any
    vector_dtype: Any
    quantize: str | None
    origin: str

    def quantizes(self, w: _Wanted) -> bool:
        """Whether a parameter is quantised on the device."""
        return self.quantize is not None and w.owner.takes_planes(w.name)

    def ready(
        self, w: _Wanted, stored: Mapping[str, tuple[str, Stored | Tensor]]
    ) -> tuple[_Wanted, list[Part], DType]:
        """Parts that fit a parameter, and the dtype that they are sent in."""
        takes = w.owner.takes_planes(w.name)
        parts: list[Part] = [
            checked(self.origin, *stored[source], shape, takes) if source else zero_part(shape)
            for source, shape in w.parts
        ]
        owns = [own for (_, own), (source, _) in zip(parts, w.parts, strict=True) if source]
        if self.quantizes(w):
            self._check_rows(w)
            return w, parts, (owns[0] or f32) if len(set(owns)) == 1 else f32
        vector = len(w.parts[0][1]) == 1
        asked = self.vector_dtype if vector and self.vector_dtype is not None else self.dtype
        kind = (owns[0] or f32) if asked is None else dtype_of(asked)
        if not kind.is_float:
            raise DTypeError(f"{self.origin}: dtype: expected f32, f16 or bf16, got {kind.name}")
        return w, parts, kind

    def _check_rows(self, w: _Wanted) -> None:
        format = one_of("load_parameters", "quantize", self.quantize, tuple(QUANTIZERS))
        if w.shape[-1] % BLOCK:
            raise WeightsError(
                f"{self.origin}: {w.path}: expected rows of a multiple of {BLOCK} to quantize as "
                f"{format}, got {list(w.shape)}"
            )


def _sent(
    w: _Wanted, parts: list[Part], kind: DType, device: Device, stays: bool
) -> Tensor | QTensor | Stacked:
    """A parameter on its device."""
    given = parts[0][0]
    if isinstance(given, Tensor):
        return given.to(device).astype(kind)
    if any(own is None for _, own in parts):
        return from_blocks(parts, kind, device)
    data = w.owner.arranged(w.name, host_data(parts, kind))
    return upload("load_parameters", data, kind, device, stays=stays)


def _check_finite(infinite: Mapping[str, list[Tensor]], origin: str) -> None:
    """Refuse weights with factors that are not finite; their numbers, by the weight's path."""
    paths = [path for path, counts in infinite.items() for _ in counts]
    counts = fetch(*(count for several in infinite.values() for count in several)).result()
    wrong = dict.fromkeys(path for path, count in zip(paths, counts, strict=True) if count)
    if wrong:
        raise WeightsError(
            f"{origin}: expected weights whose factors are finite in float16, got others in "
            f"{listed(wrong)}"
        )


def _wanted(module: Module) -> Iterator[_Wanted]:
    for path, owner, name, value in _walk(module, ""):
        if isinstance(value, Parameter):
            shape = value.shape
            parts = owner.sources(path.removesuffix(name), name, shape)
            yield _Wanted(owner, name, path, shape, parts)


def _loaded(module: Module) -> set[str]:
    """The checkpoint's names of what has been loaded, and its paths."""
    return {
        source
        for path, owner, name, value in _walk(module, "")
        if isinstance(value, Tensor)
        for source, _ in (
            (path, value.shape), *owner.sources(path.removesuffix(name), name, value.shape)
        )
    }  # fmt: skip


def _by_path(
    module: Module, tensors: Mapping[str, Stored | Array | Tensor], origin: str
) -> dict[str, tuple[str, Stored | Tensor]]:
    """Checkpoint tensors, and their own names, by the parameter path that they mean."""
    found: dict[str, tuple[str, Stored | Tensor]] = {}
    for name, tensor in tensors.items():
        path = module.rename(name)
        if path in found:
            both = f"{shown(found[path][0])} and {shown(name)}"
            raise WeightsError(f"{origin}: {both} both stand for {shown(path)}")
        found[path] = name, Plain(tensor) if isinstance(tensor, np.ndarray) else tensor
    return found


def _check_names(
    wanted: list[str],
    stored: Mapping[str, tuple[str, Stored | Tensor]],
    ignored: tuple[str, ...],
    loaded: Collection[str],
    origin: str,
) -> None:
    missing = [name for name in wanted if name not in stored]
    used = set(wanted)
    unused = [
        (path, own)
        for path, (own, _) in stored.items()
        if path not in used and not any(fnmatchcase(path, p) for p in ignored)
    ]
    left = [own for path, own in unused if path not in loaded]
    twice = [own for path, own in unused if path in loaded]
    if missing or unused:
        again = f"; already loaded (make the module anew): {listed(twice)}" if twice else ""
        raise WeightsError(
            f"{origin}: missing: {listed(missing)}; left over: {listed(left)}{again}"
        )
