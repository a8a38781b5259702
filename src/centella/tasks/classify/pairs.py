"""Pairs of texts as ids and types, without a Python object for a token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from centella.dtypes import Array
from centella.tasks.text.check_texts import checked_texts
from centella.tasks.text.tokens import Tokens, longest_first

if TYPE_CHECKING:
    from centella.tasks.text.tokenizer import Encoded, Tokenizer


class Typed(Struct, frozen=True, eq=False):
    """Token ids of texts, and of each token the part of a pair; types None: all 0."""

    tokens: Tokens
    types: Tokens | None = None

    @classmethod
    def of(cls, encoded: Sequence[Encoded]) -> Typed:
        """Of lists."""
        ids = Tokens.of([each.ids for each in encoded])
        return cls(ids, Tokens.of([each.types for each in encoded]))


class _Layout(Struct, frozen=True):
    """What the library adds to a pair.

    Attributes:
        special: before the first text, between the two, behind the second.
        types: of these and the texts, in their order.
    """

    special: tuple[list[int], list[int], list[int]]
    types: list[int]


class Pairs:
    """Tokenises texts and pairs of texts as `Tokenizer.encode_whole` does, without offsets.

    A first text that comes again, as the question of a ranking does, is tokenised once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def alone(self, texts: Sequence[str], most: int) -> Typed:
        """Of texts by themselves; raises as `Tokenizer.encode`."""
        if self._typed_alone:
            return Typed.of(self._tokenizer.encode_whole(texts, None, most))
        return Typed(self._tokenizer.tokens(texts, most))

    def pairs(self, firsts: Sequence[str], seconds: Sequence[str], most: int) -> Typed:
        """Of as many pairs; the longer text is cut. Raises as `Tokenizer.encode_whole`."""
        numbers = {text: i for i, text in enumerate(dict.fromkeys(checked_texts(firsts)))}
        room = self._tokenizer.room(most, pair=True)
        lefts, rights = self._tokenizer.bare(list(numbers)), self._tokenizer.bare(seconds)
        layout = self._layout
        if layout is None or lefts is None or rights is None:
            return Typed.of(self._tokenizer.encode_whole(firsts, seconds, most))
        left = np.array([numbers[text] for text in firsts], np.int64)
        whole = lefts.lengths[left], rights.lengths
        kept = longest_first(*whole, room)
        from_left = int(self._tokenizer.side == "left")
        away = [from_left * (some - few) for some, few in zip(whole, kept, strict=True)]
        first, second, third = (len(part) for part in layout.special)
        behind = first + second + third
        parts: tuple[tuple[Array | int, Array | int], ...] = (
            (0, first),
            (behind + lefts.starts[left] + away[0], kept[0]),
            (first, second),
            (behind + len(lefts.ids) + rights.starts + away[1], kept[1]),
            (first + second, third),
        )
        starts, sizes = np.zeros((2, len(left), len(parts)), np.int64)
        for column, (start, size) in enumerate(parts):
            starts[:, column] = start
            sizes[:, column] = size
        special = np.array([i for part in layout.special for i in part], np.uint32)
        source = np.concatenate([special, lefts.ids, rights.ids])
        each = Tokens(source, starts.ravel(), sizes.ravel(), sizes.ravel())
        lengths = sizes.sum(1)
        ids = each.taken(np.arange(sizes.size)).ids
        tokens = Tokens(ids, lengths.cumsum() - lengths, lengths, whole[0] + whole[1] + behind)
        if not any(layout.types):
            return Typed(tokens)
        types = np.repeat(np.tile(np.array(layout.types, np.uint32), len(left)), sizes.ravel())
        return Typed(tokens, replace(tokens, ids=types))

    @cached_property
    def _typed_alone(self) -> bool:
        return any(self._tokenizer.native.encode("a").type_ids)

    @cached_property
    def _layout(self) -> _Layout | None:
        """None where the library does more than add tokens around the texts."""
        native = self._tokenizer.native
        left, right = (native.encode(text, add_special_tokens=False) for text in ("a", "b"))
        first, second = list(left.ids), list(right.ids)
        whole = native.post_process(left, right)
        ids, kinds = list(whole.ids), list(whole.type_ids)
        if not first or not second or any(ids.count(i) != 1 for i in (*first, *second)):
            return None
        a, b = ids.index(first[0]), ids.index(second[0])
        edges = [0, a, a + len(first), b, b + len(second), len(ids)]
        parts = [ids[start:end] for start, end in pairwise(edges)]
        types = [set(kinds[start:end]) or {0} for start, end in pairwise(edges)]
        if (parts[1], parts[3]) != (first, second) or max(map(len, types)) > 1:
            return None
        return _Layout((parts[0], parts[2], parts[4]), [kind for (kind,) in types])
