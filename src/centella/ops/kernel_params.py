"""The signature of a kernel whose operands depend on the call."""

from __future__ import annotations

from collections.abc import Mapping

from centella.lang.kernel_params import Signature, TensorParam

NONE: Mapping[str, int] = {}


def signature(
    reads: Mapping[str, int], writes: Mapping[str, int], changes: Mapping[str, int] = NONE
) -> Signature:
    """Tensor parameters by name and rank, each in the storage dtype of its argument.

    Args:
        changes: those that are read and written in place.
    """
    modes = {"in": reads, "out": writes, "inout": changes}
    params = ((n, TensorParam(mode, None, r)) for mode, by in modes.items() for n, r in by.items())
    return Signature(tuple(params), (), ())
