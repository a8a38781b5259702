"""Where a warpgroup's products have their elements: sums in registers, factors in shared memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from centella.lang.ir import Matrix
from centella.simulator.race_check import Ids

WARP = 32
WARPGROUP = 128
DEPTH = 16  # k of one product


@lru_cache(maxsize=64)
def spread(columns: int) -> tuple[Any, Any]:
    """Row and column of each register of each thread of a warpgroup (PTX ISA, wgmma's D)."""
    register = np.arange(columns // 2)[:, None]
    thread = np.arange(WARPGROUP)[None]
    row = thread // WARP * 16 + thread % WARP // 4 + register // 2 % 2 * 8
    column = register // 4 * 8 + thread % 4 * 2 + register % 2
    return row, column


@lru_cache(maxsize=64)
def places_of(matrix: Matrix, rows: int) -> Ids:
    """Where element [row, k] of a factor lies, in elements from its start, before the pattern.

    PTX ISA, "Strides": along k eight rows are `stride` apart; else a row of memory has the rows
    (m or n) of one k, `leading` is from one panel of them to the next, `stride` from eight of k to
    the next.
    """
    row, k = np.arange(rows)[:, None], np.arange(DEPTH)[None]
    if matrix.along_k:
        return row // 8 * (matrix.stride // 2) + row % 8 * (matrix.swizzle // 2) + k
    width = matrix.swizzle // 2
    across = row // width * (matrix.leading // 2) + row % width
    return across + k // 8 * (matrix.stride // 2) + k % 8 * width
