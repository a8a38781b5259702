"""How the tensors of a checkpoint become the parameters of a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec import Struct

from centella.dtypes import DType, dtype_of, f32, from_numpy, narrow, widen
from centella.errors import DTypeError, WeightsError
from centella.runtime.device import Device
from centella.runtime.device import device as open_device
from centella.specs import Shape
from centella.tensors.tensor import Tensor, upload

if TYPE_CHECKING:
    from centella.nn.module import Module

Array = np.ndarray[Any, Any]
LISTED = 20  # names that an error shows
LONG = 200  # characters of one that it shows


class Stored(Protocol):
    """A tensor of a checkpoint: its storage type (None: one that no device stores) and bytes."""

    @property
    def dtype(self) -> DType | None:
        """What the bytes mean."""
        ...

    @property
    def shape(self) -> Shape:
        """Extents."""
        ...

    @property
    def array(self) -> Array:
        """The data on the host (bf16 as uint16)."""
        ...


class _Plain(Struct, frozen=True):
    """A NumPy array as a checkpoint's tensor."""

    array: Array

    @property
    def dtype(self) -> DType:
        return from_numpy(self.array.dtype)

    @property
    def shape(self) -> Shape:
        shape: Shape = self.array.shape
        return shape


# Path, owner, attribute and value of a parameter; a checkpoint's own name of a tensor, and that.
Slot = tuple[str, "Module", str, Any]
Named = tuple[str, "Stored | Tensor"]


class _Wanted(Struct, frozen=True):
    """A parameter to load: whose, which, and the tensors that are stacked to make it.

    Attributes:
        parts: name and shape of each; a part without a name is zeros.
        own: whether it is given by its own path, as `state_dict` has it: neither stacked nor
            arranged.
    """

    owner: Module
    name: str
    parts: tuple[tuple[str, Shape], ...]
    own: bool


def fill(
    module: Module, slots: Sequence[Slot], tensors: Mapping[str, Stored | Array | Tensor], *,
    device: str | Device | None, dtype: Any, vector_dtype: Any, origin: str,
) -> None:  # fmt: skip
    """What `Module.load_parameters` does, for all parameters of a module, loaded or not."""
    stored = _by_path(module, tensors, origin)
    loaded = [slot for slot in slots if isinstance(slot[3], Tensor)]
    wanted = [_wanted(slot, stored) for slot in slots if not isinstance(slot[3], Tensor)]
    _check_names(wanted, stored, module.ignored, _names_of(loaded), origin)
    of_vectors = dtype if vector_dtype is None else vector_dtype
    ready = [
        (w, _dtype(w, stored, of_vectors if len(w.parts[0][1]) == 1 else dtype, origin))
        for w in wanted
    ]
    where = open_device(device)
    made = [(w, _sent(w, stored, kind, where)) for w, kind in ready]  # each is read now
    for w, tensor in made:
        setattr(w.owner, w.name, tensor)
    where.recorder.flush()


def _by_path(
    module: Module, tensors: Mapping[str, Stored | Array | Tensor], origin: str
) -> dict[str, Named]:
    """Checkpoint tensors by the parameter path that they mean."""
    found: dict[str, Named] = {}
    for name, tensor in tensors.items():
        path = module.rename(name)
        if path in found:
            both = f"{_shown(found[path][0])} and {_shown(name)}"
            raise WeightsError(f"{origin}: {both} both stand for {_shown(path)}")
        found[path] = name, _Plain(tensor) if isinstance(tensor, np.ndarray) else tensor
    return found


def _sources(slot: Slot) -> tuple[tuple[str, Shape], ...]:
    path, owner, name, value = slot
    return owner.sources(path.removesuffix(name), name, value.shape)


def _wanted(slot: Slot, stored: Mapping[str, Named]) -> _Wanted:
    path, owner, name, value = slot
    parts = _sources(slot)
    _, given = stored.get(path, ("", None))
    own = given is not None and (isinstance(given, Tensor) or given.shape == value.shape)
    if own and parts != ((path, value.shape),):
        return _Wanted(owner, name, ((path, value.shape),), True)
    return _Wanted(owner, name, parts, isinstance(given, Tensor))


def _names_of(slots: Sequence[Slot]) -> set[str]:
    """The checkpoint's names of parameters, and their paths."""
    return {name for slot in slots for name, _ in ((slot[0], ()), *_sources(slot))}


def _check_names(
    wanted: list[_Wanted], stored: Mapping[str, Named], ignored: tuple[str, ...],
    loaded: set[str], origin: str,
) -> None:  # fmt: skip
    names = dict.fromkeys(source for w in wanted for source, _ in w.parts if source)
    missing = [name for name in names if name not in stored]
    unused = [
        (path, own)
        for path, (own, _) in stored.items()
        if path not in names and not any(fnmatchcase(path, p) for p in ignored)
    ]
    left = [own for path, own in unused if path not in loaded]
    twice = [own for path, own in unused if path in loaded]
    if missing or unused:
        again = f"; already loaded (make the module anew): {listed(twice)}" if twice else ""
        raise WeightsError(
            f"{origin}: missing: {listed(missing)}; left over: {listed(left)}{again}"
        )


def _dtype(w: _Wanted, stored: Mapping[str, Named], asked: Any, origin: str) -> DType:
    """The dtype that a parameter gets; refuses tensors of another shape, and what is no float."""
    own: list[DType] = []
    for source, shape in w.parts:
        if not source:
            continue
        name, tensor = stored[source]
        if tensor.shape != shape:
            raise WeightsError(
                f"{origin}: tensor {_shown(name)}: expected shape {list(shape)}, "
                f"got {list(tensor.shape)}"
            )
        if tensor.dtype is None or not tensor.dtype.is_float:
            got = tensor.dtype.name if tensor.dtype is not None else tensor.array.dtype
            raise WeightsError(
                f"{origin}: tensor {_shown(name)}: expected f32, f16 or bf16, got {got}"
            )
        own.append(tensor.dtype)
    kind = [*own, f32][0] if asked is None else dtype_of(asked)
    if not kind.is_float:
        raise DTypeError(f"{origin}: dtype: expected f32, f16 or bf16, got {kind.name}")
    return kind


def _sent(w: _Wanted, stored: Mapping[str, Named], kind: DType, where: Device) -> Tensor:
    """A parameter on its device; large tensors of a file stay in the memory they were read into."""
    parts = [
        stored[source][1] if source else _Plain(np.zeros(shape, np.float32))
        for source, shape in w.parts
    ]
    if len(parts) == 1 and isinstance(parts[0], Tensor):
        return parts[0].to(where).astype(kind)
    arrays = [_host(part, kind) for part in parts]
    data = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    stays = len(parts) > 1 or not isinstance(parts[0], _Plain)  # memory that nobody else writes
    data = data if w.own else w.owner.arranged(w.name, data)
    return upload("load_parameters", data, kind, where, stays=stays)


def _host(part: Stored | Tensor, kind: DType) -> Array:
    """A tensor's data as host bytes of `kind`; of that dtype it is not copied."""
    if isinstance(part, Tensor):
        return narrow(part.astype(f32).numpy(), kind)
    assert part.dtype is not None
    return part.array if part.dtype is kind else narrow(widen(part.array, part.dtype), kind)


def listed(names: Iterable[str]) -> str:
    """Names for an error, the first of many."""
    every = list(names)
    more = f" and {len(every) - LISTED} more" if len(every) > LISTED else ""
    return ", ".join(map(_shown, every[:LISTED])) + more or "none"


def _shown(name: str) -> str:
    """A name of a file, which may be of any length and of characters that no terminal takes."""
    return name if name.isprintable() and len(name) <= LONG else ascii(name[:LONG])
