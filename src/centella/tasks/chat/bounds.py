"""Bounds on what a template does: rounds, characters that it writes, seconds; and text in bounds.

Python computes a string or a comparison in one step that nothing can interrupt, so each is measured
before it is made. Values that contain one another a few times are small in memory and without end
in print: they are measured as print would walk them.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from string import Formatter
from typing import Any

from centella.errors import CentellaError

ROUNDS = 1_000_000  # of all loops, calls, and elements that are printed or compared
LONGEST = 10_000_000  # characters of a prompt, and of each string
WRITTEN = 400_000_000  # characters of all strings together; an element of a list counts as 8
SECONDS = 10.0
WIDEST = 1000  # columns of what is padded or indented
ELEMENT = 8
DIGITS = 15
LARGEST = 10**30  # whole number that a product or a power gives
POWER = 100  # largest
AT_ONCE = 1000  # rounds that are counted together
_BARE = (str, int, float, bool, type(None))
COMPARED = 10_000  # characters that are compared with others, as many as a round takes time for
_PARENTHESES = re.compile(r"[()]")
_FIELD = re.compile(r"[-+ #0]*(\*|[0-9]*)(?:\.(\*|[0-9]*))?[hlL]?")  # of %, behind its key


class Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self._rounds = ROUNDS
        self._written = WRITTEN
        self._end = time.monotonic() + SECONDS

    def take(self, rounds: int = 1) -> None:
        """Count rounds.

        Raises:
            CentellaError: there were more than `ROUNDS`, or they took more than `SECONDS`.
        """
        self._rounds -= rounds
        if self._rounds < 0:
            raise CentellaError(f"expected at most {ROUNDS:,} rounds of loops, got more")
        if time.monotonic() > self._end:
            raise CentellaError(f"expected to be done in {SECONDS:.0f} s")

    def room(self, length: int) -> None:
        """Count characters that are about to be written.

        Raises:
            CentellaError: a string of more than `LONGEST`, or more than `WRITTEN` in all.
        """
        if length > LONGEST:
            raise CentellaError(f"the string is too large: more than {LONGEST:,} characters")
        self._written -= length
        if self._written < 0:
            raise CentellaError(f"the strings are too large: more than {WRITTEN:,} characters")

    def written(self, value: Any) -> Any:
        """The same, a string or list that is counted."""
        if isinstance(value, str):
            self.room(len(value))
        elif isinstance(value, list | tuple):
            copies = value if isinstance(value, tuple) else ()  # of `partition`
            self.room(ELEMENT * len(value) + sum(len(v) for v in copies if isinstance(v, str)))
        return value

    def counted(self, items: Any) -> Any:
        """The same to loop over."""
        if hasattr(items, "__len__"):
            self.take(len(items))
            return items
        return self._each(items) if isinstance(items, Iterable) else items

    def _each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.take()
            yield item

    def measured(self, value: Any, indent: int = 0) -> Any:
        """The same, if all of it can be printed, hashed or compared; what is lazy is counted.

        Args:
            value: anything.
            indent: columns that each level adds to its elements.

        Raises:
            CentellaError: it has too many elements or characters, or contains itself.
        """
        if type(value) in _BARE:
            return value
        if isinstance(value, Iterator):
            return self._each(value)
        length, left, taken = 0, [(value, 0)], 0
        while left:
            item, depth = left.pop()
            taken += 1
            if taken == AT_ONCE:
                self.take(taken)
                taken = 0
            if isinstance(item, str):
                length += len(item)
            elif isinstance(item, range):
                self.take(len(item))
            elif (parts := _parts(item)) is not None:
                length += len(parts) * (ELEMENT + indent * (depth + 1))
                left += [(part, depth + 1) for part in parts]
            if length > LONGEST:
                self.room(length)
        self.take(taken)
        return value

    def text(self, value: Any) -> str:
        """A value as a string, counted."""
        text = value if isinstance(value, str) else str(self.measured(value))
        self.room(len(text))
        return text

    def joined(self, parts: Iterable[object], between: str = "") -> str:
        """The parts as one string, counted."""
        texts, length = [], 0
        for part in self._each(parts):
            texts.append(part if isinstance(part, str) else str(self.measured(part)))
            length += len(texts[-1]) + len(between)
            if length > LONGEST + len(between):
                self.room(length)
        self.room(length)
        return between.join(texts)


def _parts(value: Any) -> list[Any] | None:
    """What a container prints; None for what is none."""
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
        return list(value)
    if type(value).__name__ == "Namespace":  # Jinja's; asking an undefined value would raise
        return [value._Namespace__attrs]
    return None


# -- text -----------------------------------------------------------------------------------------


def replaced(budget: Budget, text: str, old: str, new: str, count: int | None = -1) -> str:
    """`str.replace`."""
    most = -1 if count is None else count
    times = text.count(old) if most < 0 else min(most, text.count(old))
    budget.room(len(text) + times * max(0, len(new) - len(old)))
    return text.replace(old, new, most)


def split(budget: Budget, text: str, name: str, args: tuple[Any, ...], named: Any) -> list[str]:
    """`str.split`, `rsplit` or `splitlines`: pieces are counted before there are any."""
    separator = args[0] if args else named.get("sep")
    if name == "splitlines":
        pieces = sum(map(text.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"))
    elif isinstance(separator, str) and separator:
        pieces = text.count(separator)
    else:
        pieces = sum(1 for _ in budget.counted(re.finditer(r"\s+", text)))
    budget.room(ELEMENT * pieces + len(text))
    result: list[str] = getattr(text, name)(*args, **named)
    return result


def compared(budget: Budget, text: str, others: Iterable[object]) -> None:
    """Count a method that compares each character of a text with each of another."""
    longest = max((len(other) for other in others if isinstance(other, str)), default=0)
    budget.take(len(text) * longest // COMPARED)


def padded(budget: Budget, text: str, name: str, args: tuple[Any, ...], named: Any) -> str:
    """`str.center`, `ljust`, `rjust`, `zfill` or `expandtabs`."""
    width = args[0] if args else named.get("tabsize", 8)
    if not isinstance(width, int) or not 0 <= width <= WIDEST:
        raise CentellaError(f"{name}: expected a width of 0 to {WIDEST}")
    budget.room(len(text) + width * (text.count("\t") if name == "expandtabs" else 1))
    result: str = getattr(text, name)(*args, **named)
    return result


def formatted(budget: Budget, text: str, values: Any) -> str:
    """`text % values`."""
    if any(w == "*" or _wide(w) for w in budget.counted(_widths(text))):
        raise CentellaError(f"operands of % are too large: a width above {WIDEST}, or *")
    _check_fields(budget, text, "%", values)
    return budget.text(text % values)


def _widths(text: str) -> Iterator[str]:
    """Widths and precisions of the fields of `text % values`, found as Python finds them."""
    at = text.find("%") + 1
    while at:
        if text.startswith("(", at):
            depth = 0
            for match in _PARENTHESES.finditer(text, at):
                depth += 1 if match[0] == "(" else -1
                if not depth:
                    at = match.end()
                    break
            else:  # Python raises here
                return
        field = _FIELD.match(text, at)
        assert field is not None, "each part may be empty"
        yield from (width for width in field.groups() if width)
        at = text.find("%", field.end() + 1) + 1  # behind the letter of the field


def _wide(digits: str) -> bool:
    number = digits.lstrip("0")
    return len(number) > len(str(WIDEST)) or int(number or 0) > WIDEST


def check_format(budget: Budget, text: str, values: Any) -> None:
    """Refuse a `str.format` that could grow."""
    for _, _, spec, _ in budget.counted(Formatter().parse(text)):
        if spec and ("{" in spec or any(map(_wide, re.findall(r"\d+", spec)))):
            raise CentellaError(f"format: expected widths of at most {WIDEST}, written as numbers")
    _check_fields(budget, text, "{", values)


def _check_fields(budget: Budget, text: str, mark: str, values: Any) -> None:
    """Each field may print the longest of the values."""
    each = list(values.values()) if isinstance(values, Mapping) else values
    each = each if isinstance(each, list | tuple) else [each]
    longest = max((len(budget.text(v)) for v in [*each, ""]), default=0)
    budget.room(len(text) + text.count(mark) * (longest + WIDEST))


def as_json(
    budget: Budget, value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """JSON as `json.dumps` writes it, of any characters."""
    if indent is not None and not 0 <= indent <= WIDEST:
        raise CentellaError(f"tojson: expected an indent of 0 to {WIDEST}")
    if separators is not None and sum(map(len, separators)) > ELEMENT:
        raise CentellaError(f"tojson: expected separators of at most {ELEMENT} characters")
    budget.measured(value, indent or 0)
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    budget.room(len(text))
    return text


def indented(
    budget: Budget, text: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    """Lines with a margin; not the first one, nor blank ones, unless it is said."""
    if isinstance(width, int) and not 0 <= width <= WIDEST:
        raise CentellaError(f"indent: expected a width of 0 to {WIDEST}")
    margin = width if isinstance(width, str) else " " * width
    lines = split(budget, budget.text(text), "splitlines", (True,), {})
    return budget.joined(
        margin + line if (i or first) and (blank or line.strip()) else line
        for i, line in enumerate(lines)
    )


def fits(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Refuse an operator's result that is too large to compute, and count it."""
    if operator == "%":
        return
    if operator == "+":
        for kind, each in ((str, 1), (list | tuple, ELEMENT)):
            if isinstance(left, kind) and isinstance(right, kind):
                budget.room((len(left) + len(right)) * each)
        return
    if isinstance(left, int | float) and isinstance(right, int | float):
        if isinstance(left, int) and isinstance(right, int) and not _few(operator, left, right):
            raise CentellaError(f"operands of {operator} are too large")
        return
    sizes = [len(v) if isinstance(v, str | list | tuple) else v for v in (left, right)]
    if not all(isinstance(s, int | float) and abs(s) < LONGEST for s in sizes):
        raise CentellaError(f"operands of {operator} are too large")
    each = 1 if isinstance(left, str) or isinstance(right, str) else ELEMENT
    budget.room(max(0, int(sizes[0] * sizes[1])) * each)


def _few(operator: str, left: int, right: int) -> bool:
    """Whether a product or power of whole numbers has few digits."""
    if max(abs(left), abs(right)) > LARGEST:
        return False
    if operator == "*":
        return abs(left * right) <= LARGEST
    return right <= POWER and abs(left) ** max(right, 0) <= LARGEST


def whole(text: Any, default: int = 0, base: int = 10) -> int:
    """The whole number that a text or number is, else the default."""
    if isinstance(text, str) and len(text) > WIDEST:
        return default
    try:
        return int(text, base) if isinstance(text, str) else int(text)
    except (TypeError, ValueError, OverflowError):
        try:
            return int(float(text))
        except (TypeError, ValueError, OverflowError):
            return default


def rounded(value: Any, precision: int = 0, method: str = "common") -> Any:
    """A number to a few digits."""
    if method not in ("common", "ceil", "floor") or not -DIGITS <= precision <= DIGITS:
        raise CentellaError(f"round: expected common, ceil or floor, and up to {DIGITS} digits")
    if not isinstance(value, int | float):
        raise CentellaError("round: expected a number")
    if method == "common":
        return round(value, precision)
    return getattr(math, method)(value * 10**precision) / 10**precision
