"""How the tensors of a checkpoint become the parameters of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from centella.dtypes import Array, DType, dtype_of, f32
from centella.errors import DTypeError, WeightsError
from centella.host.log import logger
from centella.nn.room import Weight, check_room
from centella.nn.stored import (
    Part,
    Plain,
    Stored,
    checked,
    filled,
    from_blocks,
    host_data,
    listed,
    shown,
    zeros,
)
from centella.runtime.device import Device
from centella.runtime.device import device as open_device
from centella.specs import Shape
from centella.tensors.arguments import one_of
from centella.tensors.qtensor import QTensor, Stacked
from centella.tensors.quantizers import BLOCK, QUANTIZERS, all_quantized
from centella.tensors.tensor import Tensor, fetch, upload

if TYPE_CHECKING:
    from centella.nn.module import Module

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
    path: str
    shape: Shape
    parts: tuple[tuple[str, Shape], ...]
    own: bool


def fill(
    module: Module, slots: Sequence[Slot], tensors: Mapping[str, Stored | Array | Tensor], *,
    device: str | Device | None, dtype: Any, vector_dtype: Any, quantize: str | None, origin: str,
    progress: Callable[[int, int], None] | None = None,
) -> None:  # fmt: skip
    """What `Module.load_parameters` does, for all parameters of a module, loaded or not."""
    stored = _by_path(module, tensors, origin)
    loaded = [slot for slot in slots if isinstance(slot[3], Tensor)]
    wanted = [_wanted(slot, stored) for slot in slots if not isinstance(slot[3], Tensor)]
    _check_names(wanted, stored, module.ignored, _names_of(loaded), origin)
    dtypes = _Dtypes(dtype, vector_dtype, quantize, origin)
    ready = [(w, *dtypes.ready(w, stored)) for w in wanted]
    where = open_device(device)
    rooms = [_weight(w, parts, kind) for w, parts, kind in ready]
    check_room([w for w in rooms if w is not None], where, quantize, origin)
    matrices = [w for w in rooms if w is not None and w.takes]
    if quantize is not None and matrices and all(w.nbytes for w in matrices):
        logger("load").warning("%s: quantize: %s changes nothing: the weights of the file are "
                               "quantised already", origin, quantize)  # fmt: skip
    sizes = [0 if w is None else w.sent(where) for w in rooms]
    weights: list[tuple[_Wanted, Tensor | QTensor | Stacked]] = []
    infinite: dict[str, list[Tensor]] = {}
    done, total = 0, sum(sizes)
    for (w, parts, kind), size in zip(ready, sizes, strict=True):  # each is read now
        weight = _sent(w, parts, kind, where)
        if quantize is not None and dtypes.quantizes(w):
            weight, infinite[w.path] = all_quantized(weight, quantize, f"{origin}: {w.path}")
            where.recorder.flush()  # so the whole weight is freed before the next is sent
        weights.append((w, weight))
        done += size
        if progress is not None:
            progress(done, total)
    if infinite:
        _check_finite(infinite, origin)
    for w, weight in weights:
        setattr(w.owner, w.name, weight)
    where.recorder.flush()


def _by_path(
    module: Module, tensors: Mapping[str, Stored | Array | Tensor], origin: str
) -> dict[str, Named]:
    """Checkpoint tensors by the parameter path that they mean."""
    entries: dict[str, Named] = {}
    for name, tensor in tensors.items():
        path = module.rename(name)
        if path in entries:
            both = f"{shown(entries[path][0])} and {shown(name)}"
            raise WeightsError(f"{origin}: {both} both stand for {shown(path)}")
        entries[path] = name, Plain(tensor) if isinstance(tensor, np.ndarray) else tensor
    return entries


def _sources(slot: Slot) -> tuple[tuple[str, Shape], ...]:
    path, owner, name, value = slot
    return owner.sources(path.removesuffix(name), name, value.shape)


def _wanted(slot: Slot, stored: Mapping[str, Named]) -> _Wanted:
    path, owner, name, value = slot
    parts = _sources(slot)
    _, entry = stored.get(path, ("", None))
    own = entry is not None and (isinstance(entry, Tensor) or entry.shape == value.shape)
    if own and parts != ((path, value.shape),):
        return _Wanted(owner, name, path, value.shape, ((path, value.shape),), True)
    return _Wanted(owner, name, path, value.shape, parts, isinstance(entry, Tensor))


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


class _Dtypes(Struct, frozen=True):
    """Arguments of `load_parameters`: what parameters become."""

    dtype: Any
    vector_dtype: Any
    quantize: str | None
    origin: str

    def quantizes(self, w: _Wanted) -> bool:
        """Whether a parameter is quantised on the device."""
        return self.quantize is not None and w.owner.takes_planes(w.name)

    def ready(self, w: _Wanted, stored: Mapping[str, Named]) -> tuple[list[Part], DType]:
        """Parts that fit a parameter, and the dtype that they are sent in."""
        takes = w.owner.takes_planes(w.name)
        parts: list[Part] = [
            checked(self.origin, *stored[source], shape, takes) if source else zeros(shape)
            for source, shape in w.parts
        ]
        owns = [own for (_, own), (source, _) in zip(parts, w.parts, strict=True) if source]
        if self.quantizes(w):
            self._check_rows(w)
            return parts, (owns[0] or f32) if len(set(owns)) == 1 else f32
        vector = len(w.parts[0][1]) == 1
        asked = self.vector_dtype if vector and self.vector_dtype is not None else self.dtype
        kind = (owns[0] or f32) if asked is None else dtype_of(asked)
        if not kind.is_float:
            raise DTypeError(f"{self.origin}: dtype: expected f32, f16 or bf16, got {kind.name}")
        return parts, kind

    def _check_rows(self, w: _Wanted) -> None:
        format = one_of("load_parameters", "quantize", self.quantize, tuple(QUANTIZERS))
        if w.shape[-1] % BLOCK:
            raise WeightsError(
                f"{self.origin}: {w.path}: expected rows of a multiple of {BLOCK} to quantize as "
                f"{format}, got {list(w.shape)}"
            )


def _weight(w: _Wanted, parts: list[Part], kind: DType) -> Weight | None:
    """What a parameter needs of a device; None: it is there."""
    if any(isinstance(part, Tensor) for part, _ in parts):
        return None
    as_is = all(own is None for _, own in parts)
    nbytes = sum(getattr(part, "nbytes", 0) for part, _ in parts) if as_is else 0
    return Weight(w.path, w.shape, kind, nbytes, w.owner.takes_planes(w.name))


def _sent(w: _Wanted, parts: list[Part], kind: DType, device: Device) -> Tensor | QTensor | Stacked:
    """A parameter on its device; large tensors of a file stay in the memory they were read into."""
    first = parts[0][0]
    if len(parts) == 1 and isinstance(first, Tensor):
        return first.to(device).astype(kind)
    if any(own is None for _, own in parts):
        return from_blocks(parts, kind, device)
    if w.own or w.owner.keeps_order(w.name):
        weight = filled(parts, kind, device)
        if weight is not None:
            return weight.reshape(w.shape)
    data = host_data(parts, kind)
    stays = len(parts) > 1 or not isinstance(first, Plain)  # memory that nobody else writes
    data = data if w.own else w.owner.arranged(w.name, data)
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
