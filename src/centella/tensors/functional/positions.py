"""Positions of tokens: rotary embedding and its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from centella.errors import ShapeError
from centella.tensors.arguments import real, whole
from centella.tensors.tensor import Tensor, apply

__all__ = ["rope", "rope_tables"]

if TYPE_CHECKING:
    from numpy.typing import NDArray


def rope_tables(
    head_dim: int, max_positions: int, theta: float = 10000.0, *, rotary_dim: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The cosines and sines that `rope` reads: angle p theta^(-2 j / rotary_dim) of pair j.

    Args:
        head_dim: columns of a head; rotary_dim: how many of them turn, by default all.
        max_positions: rows of the tables: positions 0 to max_positions - 1.
        theta: base of the frequencies.

    Returns:
        cos and sin, f32 [max_positions, rotary_dim / 2], computed in float64.

    Raises:
        ShapeError: for an odd rotary_dim, or more than head_dim; a theta of 0 or less.
    """
    most = whole("rope_tables", "head_dim", head_dim)
    columns = most if rotary_dim is None else whole("rope_tables", "rotary_dim", rotary_dim)
    rows = whole("rope_tables", "max_positions", max_positions)
    if columns % 2 or not 2 <= columns <= most:
        raise ShapeError(f"rope_tables: expected an even rotary_dim of 2 to {most}, got {columns}")
    base = real("rope_tables", "theta", theta)
    if not base > 0:
        raise ShapeError(f"rope_tables: expected theta above 0, got {theta}")
    frequencies = base ** (-np.arange(0, columns, 2, dtype=np.float64) / columns)
    angles = np.arange(rows, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *,
    interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Rotary position embedding (Su et al. 2021): pairs of columns turn by their position's angle.

    (a, b) becomes (a cos - b sin, b cos + a sin); columns from rotary_dim on pass unchanged.

    Args:
        x: [batch, heads, seq_len, head_dim]; batch, heads and positions may have any strides.
        cos, sin: f32 [max_positions, rotary_dim / 2], made on the host: `rope_tables`.
        positions: None for 0 to seq_len - 1; i32 [batch], the first position of each sequence; or
            i32 [batch, seq_len]. They are read on the device and must lie within the tables: a
            token with another position gets NaN in its pairs.
        interleaved: pairs are columns (2 j, 2 j + 1), as in GPT-J; else (j, j + rotary_dim / 2),
            as in Llama and GPT-NeoX.

    Raises:
        ShapeError: for shapes that do not fit these, or more positions than the tables have.
        DTypeError: for tables that are not f32, or positions that are not i32.
    """
    more: tuple[Tensor, ...] = () if positions is None else (positions,)
    return apply("rope", x, cos, sin, *more, interleaved=bool(interleaved))
