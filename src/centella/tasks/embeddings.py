"""What texts are embedded as, which of them were cut, and pieces of texts put together again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from centella.dtypes import Array
from centella.tasks.tokens import Tokens


class Cut(Struct, frozen=True):
    """A text of which the model has not read all.

    Attributes:
        index: of the text among those given.
        tokens: that it has, special ones and those of its prompt counted.
        read: of these, how many the model has read.
    """

    index: int
    tokens: int
    read: int


class Embeddings(Struct, frozen=True, eq=False):
    """What `Embedder.embed` gives: a row for each text, in their order.

    Attributes:
        dense: vectors [texts, dim], as `Embedder.encode` gives them.
        cut: the texts that are longer than the model reads, with their tokens.
    """

    dense: Array
    cut: tuple[Cut, ...] = ()


class Pieces(Struct, frozen=True):
    """Texts as the model reads them: whole, or in pieces.

    Attributes:
        texts: the pieces, those of a text one after the other.
        owners: of each piece, the number of its text.
        weights: of each piece, its share in the vector of its text.
    """

    texts: list[str]
    owners: list[int]
    weights: list[int]


def joined(vectors: Array, pieces: Pieces, normalize: bool) -> Array:
    """Vectors f32 of pieces [pieces, dim] to those of their texts [texts, dim].

    A text in several pieces has the mean of their vectors, each weighed by its tokens.
    """
    owners = np.array(pieces.owners, np.int64)
    first = np.flatnonzero(np.diff(owners, prepend=-1))
    if len(first) == len(owners):
        return vectors
    weights = np.array(pieces.weights, np.float32)[:, None]
    means = np.add.reduceat(vectors * weights, first) / np.add.reduceat(weights, first)
    if normalize:
        means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
    alone = np.diff(first, append=len(owners)) == 1
    means[alone] = vectors[first[alone]]  # to the bit
    return means


def texts_cut(parts: Sequence[Tokens], owners: Sequence[int]) -> tuple[Cut, ...]:
    """Those that have more tokens than were read."""
    cuts, first = [], 0
    for part in parts:
        for i in np.flatnonzero(part.counts > part.lengths).tolist():
            cuts.append(Cut(owners[first + i], int(part.counts[i]), int(part.lengths[i])))
        first += len(part)
    return tuple(cuts)
