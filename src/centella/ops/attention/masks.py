"""Which keys a query sees: the part of a kernel that every variant shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from centella import lang
from centella.dtypes import bool_, i32, u32

LOWEST = -3.0e38


def reach(masks: dict[str, Any], causal: bool, b: Any, lq: Any, lk: Any) -> tuple[Any, Any]:
    """How many keys any query of sequence `b` may see, and where query 0 stands; both uniform.

    Query i sees keys up to its position, that of query 0 plus i; None where it sees all. The
    parameter `start` is that position where it follows from shapes, else what is added to `starts`.
    """
    count, start = lk, None
    if "lengths" in masks:
        given = lang.bitcast(lang.maximum(masks["lengths"][b], 0), u32)
        count = lang.workgroup_uniform(lang.minimum(given, lk))
    if "starts" in masks:
        given = lang.minimum(masks["starts"][b], lang.bitcast(lk, i32))
        start = lang.workgroup_uniform(given) + lang.parameter("start", i32)
        count = lang.minimum(count, upto(start, lq))
    elif causal:
        start = lang.parameter("start", i32)
    return count, start


def upto(start: Any, queries: Any) -> Any:
    """Keys that the first `queries` queries see; 0 where they stand before the first key."""
    return lang.bitcast(lang.maximum(start + lang.bitcast(queries, i32), 0), u32)


def sees(start: Any, query: Any, key: Any) -> Any:
    """Whether a key stands at the query's position or before it."""
    return lang.bitcast(key, i32) <= start + lang.bitcast(query, i32)


def counting(masks: dict[str, Any], b: Any, end: Any) -> Callable[[Any], Any]:
    """Whether a key counts for any query: it is before `end`, and `key_mask` lets it through."""

    def counts(key: Any) -> Any:
        inside = key < end
        if "key_mask" not in masks:
            return inside
        at = b * lang.parameter("mb", u32) + lang.select(inside, key, 0)
        return inside & lang.cast(masks["key_mask"][at], bool_)

    return counts


def added(masks: dict[str, Any], b: Any, head: Any, query: Any, key: Any) -> Any:
    """What the mask adds for a query and a key, which are both within the tensor."""
    at = b * lang.parameter("ab", u32) + head * lang.parameter("ah", u32)
    at = at + query * lang.parameter("al", u32) + key * lang.parameter("ak", u32)
    value = masks["mask"][at]
    return lang.select(value, 0.0, LOWEST) if value.dtype is bool_ else value


def shows(value: Any) -> Any:
    """Whether what a mask adds leaves a key visible; NaN does."""
    return (value > LOWEST) | lang.isnan(value)
