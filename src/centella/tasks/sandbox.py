"""Jinja for templates that anybody may have written: no Python objects, bounds on all that grows.

Text is bounded where it grows (operators, blocks, filters, methods); rounds of loops and calls are
counted together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, ClassVar

from centella.errors import CentellaError, MissingExtraError

ROUNDS = 1_000_000  # of all loops and calls
LONGEST = 50_000_000  # characters of a prompt, and of each string
ROUNDS_KEY = "rounds of loops"  # no name that a template can write
DEEPEST = 100  # columns of an indent
GONE_FILTERS = ("center", "format", "pprint", "urlize", "wordwrap", "xmlattr", "batch", "slice")
GONE_METHODS = frozenset(
    ("center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill")
)


class Rounds:
    """Counts the rounds of all loops, and the calls, of one rendering."""

    def __init__(self) -> None:
        self._left = ROUNDS

    def take(self, rounds: int) -> None:
        """Count some.

        Raises:
            CentellaError: there were more than `ROUNDS`.
        """
        self._left -= rounds
        if self._left < 0:
            raise CentellaError(f"expected at most {ROUNDS:,} rounds of loops, got more")

    def counted(self, items: Any) -> Any:
        """The same to loop over."""
        if hasattr(items, "__len__"):
            self.take(len(items))
            return items
        return self._each(items) if isinstance(items, Iterable) else items

    def _each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.take(1)
            yield item


def _joined(parts: Iterable[object]) -> str:
    """The parts as one string."""
    texts, length = [], 0
    for part in parts:
        texts.append(str(part))
        length += len(texts[-1])
        if length > LONGEST:
            raise CentellaError("the string is too large")
    return "".join(texts)


def _replaced(text: str, old: str, new: str, count: int | None = None) -> str:
    found = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    if len(text) + found * max(0, len(new) - len(old)) > LONGEST:
        raise CentellaError("the string is too large")
    return text.replace(old, new, -1 if count is None else count)


def _fits(operator: str, left: Any, right: Any) -> bool:
    """Whether a result is of a size to compute."""
    if operator == "%":
        return not isinstance(left, str)  # a format's result can be of any size
    if operator == "+":
        sized = isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple)
        return not sized or len(left) + len(right) <= LONGEST
    sizes = [len(v) if isinstance(v, str | list | tuple) else v for v in (left, right)]
    if not all(isinstance(s, int | float) and abs(s) < LONGEST for s in sizes):
        return False
    most = 64 if operator == "**" else LONGEST
    return bool(abs(sizes[0] * sizes[1]) <= LONGEST and abs(sizes[1]) <= most)


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    if indent is not None and not 0 <= indent <= DEEPEST:
        raise CentellaError(f"tojson: expected an indent of 0 to {DEEPEST}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _indented(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    if not 0 <= width <= DEEPEST:
        raise CentellaError(f"indent: expected a width of 0 to {DEEPEST}")
    margin = " " * width
    lines = str(text).splitlines(keepends=True)
    return _joined(
        margin + line if (i or first) and (blank or line.strip()) else line
        for i, line in enumerate(lines)
    )


def environment() -> tuple[Any, type[Exception]]:
    """A sandbox, and the class of its errors.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    try:
        import jinja2
        from jinja2 import compiler, ext, nodes, sandbox
    except ImportError as error:
        raise MissingExtraError("jinja2", "models") from error

    class Code(compiler.CodeGenerator):
        def visit_Concat(self, node: Any, frame: Any) -> None:  # noqa: N802
            self.write("environment.concat((")
            for arg in node.nodes:
                self.visit(arg, frame)
                self.write(", ")
            self.write("))")

    class Generation(ext.Extension):
        """`{% generation %}` marks what the model wrote, for training: its body is rendered."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):
        code_generator_class = Code
        concat = staticmethod(_joined)
        intercepted_binops = frozenset(["*", "**", "+", "%"])

        def _parse(self, source: str, name: Any, filename: Any) -> Any:
            tree = super()._parse(source, name, filename)
            for loop in tree.find_all(nodes.For):
                loop.iter = nodes.Filter(
                    loop.iter, "rounds", [], [], None, None, lineno=loop.lineno
                )
            return tree

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if not _fits(operator, left, right):
                raise CentellaError(f"operands of {operator} are too large")
            return super().call_binop(context, operator, left, right)

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            gone = isinstance(obj, str) and attr in GONE_METHODS
            return not gone and super().is_safe_attribute(obj, attr, value)

        def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            context.resolve(ROUNDS_KEY).take(1)
            text = getattr(function, "__self__", None)
            if isinstance(text, str):
                name = function.__name__
                if name == "join":
                    parts: list[object] = list(*args)
                    _joined(text if i % 2 else parts[i // 2] for i in range(2 * len(parts) - 1))
                elif name == "replace":
                    return _replaced(text, *args, **kwargs)
            return super().call(context, function, *args, **kwargs)

    @jinja2.pass_context
    def rounds(context: Any, items: Any) -> Any:
        return context.resolve(ROUNDS_KEY).counted(items)

    @jinja2.pass_context
    def join(context: Any, value: Any, d: str = "", attribute: Any = None) -> str:
        if attribute is not None:
            value = sandboxed.call_filter(
                "map", value, kwargs={"attribute": attribute}, context=context
            )
        items = list(value)
        return _joined(d if i % 2 else items[i // 2] for i in range(2 * len(items) - 1))

    def replaced(text: Any, old: str, new: str, count: int | None = None) -> str:
        return _replaced(str(text), str(old), str(new), count)

    def refuse(message: Any) -> None:
        raise jinja2.TemplateRuntimeError(str(message))

    def now(form: str) -> str:
        if re.search(r"%\D?\d", form) or len(form) > 1000:
            raise CentellaError("strftime_now: expected a format without widths")
        return datetime.now().strftime(form)

    sandboxed = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, Generation]
    )
    sandboxed.filters.update(
        tojson=_as_json, rounds=rounds, join=join, replace=replaced, indent=_indented
    )
    for name in GONE_FILTERS:
        del sandboxed.filters[name]
    sandboxed.globals.update(raise_exception=refuse, strftime_now=now, range=range)
    del sandboxed.globals["lipsum"]
    return sandboxed, jinja2.TemplateError
