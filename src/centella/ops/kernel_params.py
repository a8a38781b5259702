"""The face of a kernel whose operands depend on the call."""

from __future__ import annotations

from collections.abc import Mapping

from centella.lang.kernel_params import Face, TensorParam

NONE: Mapping[str, int] = {}


def face(
    reads: Mapping[str, int], writes: Mapping[str, int], changes: Mapping[str, int] = NONE
) -> Face:
    """Tensor parameters by name and rank, each in the storage dtype of its argument.

    Args:
        changes: those that are read and written in place.
    """
    modes = {"in": reads, "out": writes, "inout": changes}
    params = ((n, TensorParam(mode, None, r)) for mode, by in modes.items() for n, r in by.items())
    return Face(tuple(params), (), ())
