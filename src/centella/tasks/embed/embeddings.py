"""What texts are embedded as, which of them were cut, and pieces of texts put together again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from centella.dtypes import Array
from centella.errors import ShapeError
from centella.host.log import logger
from centella.tasks.embed.forward import DENSE
from centella.tasks.embed.token_outputs import Sparse, merged, vectors_by_token, weights_by_id
from centella.tasks.text.batches import Batch
from centella.tasks.text.chunks import Chunker
from centella.tasks.text.tokens import Tokens
from centella.tensors.arguments import whole

if TYPE_CHECKING:
    from centella.tasks.text.tokenizer import Tokenizer


class Cut(Struct, frozen=True):
    """A text that was cut.

    Attributes:
        index: position of the text in the input.
        tokens: tokens of the text, special tokens and prompt included.
        read: how many of them the model read.
    """

    index: int
    tokens: int
    read: int


class Embeddings(Struct, frozen=True, eq=False):
    """Result of `Embedder.embed`: a row for each text, in their order.

    Attributes:
        dense: vectors [texts, dim], as `Embedder.encode` gives them.
        sparse: for each text the weights of its tokens, by token id, without special tokens.
        multi: for each text the vectors of its tokens [tokens, dim], of length 1, without the start
            token.
        cut: the texts that are longer than the model reads, with their tokens.

    Outputs that were not requested are empty: [texts, 0] and empty lists.
    """

    dense: Array
    sparse: list[Sparse]
    multi: list[Array]
    cut: tuple[Cut, ...]


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


def pieces_of(texts: list[str], overlap: int, chunker: Chunker | None) -> Pieces:
    """Texts as they are; with a chunker, those that are longer in pieces.

    Raises:
        ShapeError: an overlap without a chunker.
    """
    if chunker is not None:
        return in_pieces(texts, chunker)
    if whole("encode", "overlap", overlap):
        raise ShapeError(f"encode: overlap: expected chunk= beside it, got {overlap} alone")
    return Pieces(texts, list(range(len(texts))), [])


def in_pieces(texts: list[str], chunker: Chunker) -> Pieces:
    """Texts in the pieces that a chunker cuts them into."""
    pieces = Pieces([], [], [])
    for i, tokens in enumerate(chunker.counts(texts)):
        for piece in chunker.chunks(texts[i], tokens):
            pieces.texts.append(piece.text)
            pieces.owners.append(i)
            pieces.weights.append(max(1, piece.tokens))
    return pieces


class Rows:
    """The outputs of pieces as batches give them, then those of their texts.

    Args:
        pieces: how many; outputs: which are wanted.
        dim: numbers of a dense vector; tokenizer: whose special tokens have no sparse weight.
    """

    def __init__(
        self, pieces: int, outputs: tuple[str, ...], dim: int, tokenizer: Tokenizer
    ) -> None:  # fmt: skip
        self._special: frozenset[int] = frozenset()
        if "sparse" in outputs:
            self._special = tokenizer.special_ids
        self._outputs = outputs
        self._dense = np.empty((pieces, dim if "dense" in outputs else 0), np.float32)
        self._sparse: list[Sparse] = [{}] * pieces
        self._multi: list[Array] = [self._dense] * pieces

    def take(self, batch: Batch, outputs: dict[str, Array]) -> None:
        """Keep what a batch gave: the rows of its pieces come first."""
        if "dense" in self._outputs:
            rows = outputs["dense"][: len(batch.texts)]
            if len(self._dense) == 1:
                self._dense = rows
            else:
                self._dense[batch.texts] = rows
        if self._outputs == DENSE:
            return
        for row, (i, number) in enumerate(zip(batch.texts, batch.rows, strict=True)):
            ids = batch.tokens.row(number)
            if "sparse" in self._outputs:
                self._sparse[i] = weights_by_id(ids, outputs["sparse"][row], self._special)
            if "multi" in self._outputs:
                self._multi[i] = vectors_by_token(ids, outputs["multi"][row])

    def joined(self, pieces: Pieces, normalize: bool, cut: tuple[Cut, ...]) -> Embeddings:
        """Of texts: dense the mean of their pieces, sparse the largest weights, multi all."""
        dense = means(self._dense, pieces, normalize)
        if self._outputs == DENSE:
            return Embeddings(dense, [], [], cut)
        by_text = groupby(range(len(self._dense)), pieces.owners.__getitem__)
        groups = [list(group) for _, group in by_text]
        sparse, multi = self._sparse, self._multi
        return Embeddings(
            dense,
            [merged([sparse[i] for i in g]) for g in groups] if "sparse" in self._outputs else [],
            [np.concatenate([multi[i] for i in g]) for g in groups]
            if "multi" in self._outputs
            else [],
            cut,
        )


def means(vectors: Array, pieces: Pieces, normalize: bool) -> Array:
    """Vectors f32 of pieces [pieces, dim] to those of their texts [texts, dim].

    A text in several pieces has the mean of their vectors, each weighed by its tokens.
    """
    if not pieces.weights:
        return vectors
    owners = np.array(pieces.owners, np.int64)
    first = np.flatnonzero(np.diff(owners, prepend=-1))
    if len(first) == len(owners):
        return vectors
    weights = np.array(pieces.weights, np.float32)[:, None]
    result = np.add.reduceat(vectors * weights, first) / np.add.reduceat(weights, first)
    if normalize:
        result /= np.maximum(np.linalg.norm(result, axis=1, keepdims=True), 1e-12)
    alone = np.diff(first, append=len(owners)) == 1
    result[alone] = vectors[first[alone]]  # to the bit
    return result


def texts_cut(parts: Sequence[Tokens], owners: Sequence[int]) -> tuple[Cut, ...]:
    """Those that have more tokens than were read."""
    cuts, first = [], 0
    for part in parts:
        uncut = part.counts is part.lengths
        for i in () if uncut else (part.counts > part.lengths).nonzero()[0].tolist():
            cuts.append(Cut(owners[first + i], int(part.counts[i]), int(part.lengths[i])))
        first += len(part)
    return tuple(cuts)


def tell_of_cut(embeddings: Embeddings) -> None:
    """Log which text of those that were cut is the first."""
    first = embeddings.cut[0]
    logger("embed").warning(
        "encode: texts[%d] has %d tokens, of which the model reads %d (config.max_length); "
        "%d of %d texts are cut: embed(texts).cut names them, chunk= embeds all of them; "
        "later calls do not say so again",
        first.index, first.tokens, first.read, len(embeddings.cut), len(embeddings.dense),
    )  # fmt: skip
