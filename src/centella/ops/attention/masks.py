"""Which keys a query sees, and its scores of them: the part of a kernel that all variants share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import bool_, f32, i32, u32
from centella.errors import ShapeError
from centella.lang.values import Expr, Operand
from centella.specs import Shape

LOWEST = -3.0e38
HIDES = -(2.0**119)  # a mask of so little hides a key: times LOG2E it is above `rows.UNSEEN`


class Scoring(Struct, frozen=True):
    """What a program is written for; windows and caps themselves are launch parameters.

    Attributes:
        causal: a query sees no key after its own position.
        windowed: it sees none of `window` positions away, or further.
        capped: scores are c tanh(score / c).
    """

    causal: bool = False
    windowed: bool = False
    capped: bool = False


def misshapen(scores: Shape, mask: Shape) -> ShapeError:
    """The error of a mask that does not broadcast to the scores."""
    extents = ", ".join("1" if n == 1 else f"{n} or 1" for n in scores)
    return ShapeError(
        f"attention: expected mask [{extents}], or with leading extents left out, got {list(mask)}"
    )


def product_scale(scoring: Scoring, unit: float = 1.0) -> Expr:
    """What products of queries and keys are multiplied by; the host divides it by a cap."""
    scale = lang.parameter("scale", f32)
    return scale if scoring.capped or unit == 1.0 else scale * unit


def bounded(score: Operand, scoring: Scoring, unit: float = 1.0) -> Any:
    """The score of a product times its factor; `unit`: LOG2E for logarithms to base 2."""
    if not scoring.capped:
        return score
    cap = lang.parameter("softcap", f32)
    return lang.tanh(score) * (cap if unit == 1.0 else cap * unit)


def sink_of(
    masks: dict[str, Any], head: Any, unit: float = 1.0, lowest: float = LOWEST
) -> tuple[Expr, Expr]:
    """Where the running maximum and sum of a head's softmax begin: with its sink, or with nothing.

    Args:
        unit: of scores, as for `bounded`; lowest: a maximum without a score.

    Returns:
        Maximum and sum; of a sink that is NaN the sum is NaN, and so is what is divided by it.
    """
    if "sinks" not in masks:
        return lang.const(lowest, f32), lang.const(0.0, f32)
    sink = masks["sinks"][head] * unit
    weight = lang.select(sink > lowest, 1.0, 0.0)
    return lang.fmax(sink, lowest), lang.select(lang.isnan(sink), sink, weight)


def share_of(total: Operand) -> Expr:
    """What a sum of weighted values is multiplied by: 1 / total, and 0 where no key is seen."""
    return lang.select(total == 0.0, 0.0, 1.0 / total)


class Sight:
    """Which keys the queries of sequence `b` see.

    A query stands at the position of query 0 plus its number. The parameter `start` is the position
    of query 0 where that follows from shapes, else what is added to `starts`.

    Args:
        same: makes uniform what all threads that ask have in common.

    Attributes:
        begin, end: no query sees a key before `begin`, or from `end` on; the same in a group.
        ordered: whether it depends on a query's position what it sees.
    """

    def __init__(
        self, masks: dict[str, Any], scoring: Scoring, b: Any, lq: Any, lk: Operand,
        same: Callable[[Any], Any] = lang.workgroup_uniform,
    ) -> None:  # fmt: skip
        self._masks, self._b, self._lq, self._lk = masks, b, lq, lk
        self.end: Any = lk
        if "lengths" in masks:
            length = lang.bitcast(lang.maximum(masks["lengths"][b], 0), u32)
            self.end = same(lang.minimum(length, lk))
        self._window: Any = lang.parameter("window", i32) if scoring.windowed else None
        self._both_sides = scoring.windowed and not (scoring.causal or "starts" in masks)
        self.ordered: bool = scoring.causal or scoring.windowed or "starts" in masks
        placed = self.ordered or "bias" in masks
        self._start: Any = lang.parameter("start", i32) if placed else None
        if "starts" in masks:  # further on no key is seen, or the same ones with the same bias
            most = lang.bitcast(lk, i32)
            most = most if self._window is None else most + self._window
            most = most + lang.parameter("distances", i32) if "bias" in masks else most
            start = same(lang.minimum(masks["starts"][b], most))
            self._start = start + self._start
            self.end = self.until(lq)
        first = self.since(lang.const(0, u32))
        self.begin: Any = lang.minimum(first, self.end) if scoring.windowed else first

    def since(self, query: Operand) -> Expr:
        """The first key that a query sees, and those after it."""
        if self._window is None:
            return lang.const(0, u32)
        first = self._start + lang.bitcast(query, i32) - self._window + 1
        return lang.bitcast(lang.maximum(first, 0), u32)

    def until(self, queries: Operand) -> Any:
        """Where the keys end that the first `queries` queries see."""
        if not self.ordered:
            return self.end
        last = self._start + lang.bitcast(queries, i32)
        last = last + (self._window - 1) if self._both_sides else last
        return lang.minimum(self.end, lang.bitcast(lang.maximum(last, 0), u32))

    def sees(self, query: Operand, key: Operand) -> Any:
        """Whether a key that counts stands where the query sees it."""
        at, key = self._start + lang.bitcast(query, i32), lang.bitcast(key, i32)
        if self._window is None:
            return key <= at
        span = self._window  # from the last key that it sees to the first: one comparison for both
        if self._both_sides:
            at, span = at + (self._window - 1), self._window * 2 - 1
        return lang.bitcast(at - key, u32) < lang.bitcast(span, u32)

    def counts(self, key: Any, end: Any = None) -> Any:
        """Whether a key counts for any query: `key_mask` lets it through, it is before `end`."""
        inside = key < (self.end if end is None else end)
        if self._window is not None:
            inside = inside & (key >= self.begin)
        if "key_mask" not in self._masks:
            return inside
        at = self._b * lang.parameter("mb", u32) + lang.select(inside, key, 0)
        return inside & lang.cast(self._masks["key_mask"][at], bool_)

    def seen(
        self, score: Operand, counted: Operand, head: Any, query: Operand, key: Operand,
        unit: float = 1.0,
    ) -> tuple[Operand, Operand]:  # fmt: skip
        """A score with what bias and mask add, and whether the query sees the key.

        Args:
            counted: whether the key counts for any query.
            unit: of the score, as for `bounded`.
        """
        if self.ordered:
            counted = counted & self.sees(query, key)
        if "bias" in self._masks:
            score = lang.fma(self._bias(head, query, key), unit, score)
        if "mask" in self._masks:
            query, key = lang.minimum(query, self._lq - 1), lang.minimum(key, self._lk - 1)
            value = _added(self._masks, self._b, head, query, key)
            score = score + value if unit == 1.0 else lang.fma(value, unit, score)
            counted = counted & ((value > HIDES) | lang.isnan(value))
        return score, counted

    def _bias(self, head: Any, query: Any, key: Any) -> Any:
        """What the table adds for the distance of a key; further ones are as the furthest."""
        count = lang.parameter("distances", i32)
        away = lang.bitcast(key, i32) - (self._start + lang.bitcast(query, i32))
        at = lang.minimum(lang.maximum(away + count // 2, 0), count - 1)
        return self._masks["bias"][head * lang.parameter("bias_row", u32) + lang.bitcast(at, u32)]


def _added(masks: dict[str, Any], b: Operand, head: Operand, query: Operand, key: Operand) -> Expr:
    """What the mask adds for a query and a key, which are both within the tensor."""
    at = b * lang.parameter("ab", u32) + head * lang.parameter("ah", u32)
    at = at + query * lang.parameter("al", u32) + key * lang.parameter("ak", u32)
    value = masks["mask"][at]
    return lang.select(value, 0.0, LOWEST) if value.dtype is bool_ else value
