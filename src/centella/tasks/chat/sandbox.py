"""Jinja for templates that anybody may have written: no Python objects, bounds on all that grows.

What templates of published models use is there, as transformers has it: `tojson` without escapes,
`strftime_now`, `raise_exception`, loop controls, `{% generation %}`. The module loads with the
first template; without jinja2 its import raises MissingExtraError.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any

from centella.errors import CentellaError, MissingExtraError
from centella.tasks.chat import bounds
from centella.tasks.chat.bounds import LONGEST, Budget

try:
    import jinja2
    from jinja2 import compiler, ext, nodes, sandbox
except ImportError as _error:
    raise MissingExtraError("jinja2", "models") from _error

BUDGET = "what is left"  # in a context: no name that a template can write
GONE_FILTERS = ("batch", "slice", "striptags", "sum", "urlize", "wordwrap", "xmlattr")
# The methods of strings that there are: what a later Python adds is not there.
METHODS = frozenset(
    """capitalize casefold center count endswith expandtabs find format format_map index isalnum
    isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle
    isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust
    rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill""".split()
)
COMPARING = ("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition", "rsplit")
SPLITS = ("split", "rsplit", "splitlines")
PADS = ("center", "ljust", "rjust", "zfill", "expandtabs")
FORMATS = ("format", "format_map")
CONTAINERS = (list, tuple, dict, type, jinja2.runtime.LoopContext)  # methods compare or print
SCOPES = ("_loop_vars", "_block_vars")  # that Jinja adds to the arguments of a call
# Filters that neither print nor compare the value before them.
LAZY = frozenset(
    ("attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random",
     "reject", "rejectattr", "reverse", "select", "selectattr")
)  # fmt: skip


def budget_of(context: Any) -> Budget:
    """The budget of the rendering that a context belongs to."""
    budget: Budget = context.resolve(BUDGET)
    return budget


def rendered(template: Any, variables: dict[str, Any]) -> str:
    """What a template of the sandbox writes.

    Raises:
        CentellaError: it is longer than `LONGEST`, or an operation of it could be.
    """
    pieces, length = [], 0
    for piece in template.generate({**variables, BUDGET: Budget()}):
        length += len(piece)
        if length > LONGEST:
            raise CentellaError(f"expected a prompt of at most {LONGEST:,} characters, got more")
        pieces.append(piece)
    return "".join(pieces)


class _Code(compiler.CodeGenerator):
    def visit_Concat(self, node: Any, frame: Any) -> None:  # noqa: N802
        self._calls("joined", [nodes.List(node.nodes)], frame)

    def visit_Getitem(self, node: Any, frame: Any) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        absent = nodes.Const(None)
        ends = [p or absent for p in (node.arg.start, node.arg.stop, node.arg.step)]
        self._calls("sliced", [node.node, *ends], frame)

    def _calls(self, name: str, args: list[Any], frame: Any) -> None:
        """A call of a filter, of which nothing is computed as the template is compiled."""
        self.write(f"environment.filters[{name!r}](context")
        for arg in args:
            self.write(", ")
            self.visit(arg, frame)
        self.write(")")


class _Generation(ext.Extension):
    """`{% generation %}` marks what the model wrote, for training: its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = _Code
    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def _parse(self, source: str, name: Any, filename: Any) -> Any:
        return _marked(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = budget_of(context)
        if operator == "%" and isinstance(left, str):
            return bounds.formatted(budget, left, right)
        bounds.fits(budget, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        gone = isinstance(obj, str) and attr not in METHODS
        gone = gone or isinstance(obj, bool | int | float | complex | bytes)
        return not gone and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.take()
        owner = getattr(function, "__self__", None)
        named = {n: v for n, v in kwargs.items() if n not in SCOPES}
        if isinstance(owner, str):
            if function.__name__ not in FORMATS:
                return budget.written(_called(budget, owner, function, args, named))
            function = self.getattr(owner, function.__name__)
        if isinstance(owner, CONTAINERS) or isinstance(function, type):
            args = tuple(map(budget.measured, args))
            budget.measured(list(named.values()))
        if isinstance(function, jinja2.runtime.LoopContext):
            args = tuple(map(budget.counted, args))
        # A string's own `format`, which Jinja keeps from attributes that are not safe.
        text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(text, str):
            _check_format(budget, text, args, named)
        return budget.written(super().call(context, function, *args, **kwargs))


def environment() -> tuple[Any, type[Exception]]:
    """A sandbox, and the class of its errors."""
    sandbox = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation],
        finalize=jinja2.pass_context(lambda context, value: budget_of(context).text(value)),
    )  # fmt: skip
    for name in GONE_FILTERS:
        del sandbox.filters[name]
    for table in (sandbox.filters, sandbox.tests):
        table.update({n: _guarded(f, n) for n, f in table.items()})
    sandbox.filters.update({n: _bound(f) for n, f in _FILTERS.items()})
    sandbox.globals.update(raise_exception=_refuse, strftime_now=_now, range=range)
    del sandbox.globals["lipsum"]
    return sandbox, jinja2.TemplateError


@jinja2.pass_context
def _refuse(context: Any, message: Any) -> None:
    raise jinja2.TemplateRuntimeError(budget_of(context).text(message))


def _marked(tree: Any) -> Any:
    """The template with what its loops, comparisons and keys are given counted."""

    def within(name: str, node: Any) -> Any:
        if isinstance(node, nodes.Const | nodes.TemplateData):
            return node
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    for loop in list(tree.find_all(nodes.For)):
        loop.iter = within("counted", loop.iter)
    for compare in list(tree.find_all(nodes.Compare)):
        compare.expr = within("measured", compare.expr)
        for operand in compare.ops:
            operand.expr = within("measured", operand.expr)
    for pair in list(tree.find_all(nodes.Pair)):
        pair.key = within("measured", pair.key)
    for item in list(tree.find_all(nodes.Getitem)):
        if not isinstance(item.arg, nodes.Slice):
            item.arg = within("measured", item.arg)
    return tree


def _called(budget: Budget, text: str, function: Any, args: Any, named: Any) -> Any:
    """A method of a string."""
    name: str = function.__name__
    if name in COMPARING:
        bounds.compared(budget, text, [*args, *named.values()])
    if name == "join":
        return budget.joined(args[0], text)
    elif name == "replace":
        return bounds.replaced(budget, text, *args, **named)
    elif name in SPLITS:
        return bounds.split(budget, text, name, args, named)
    elif name in PADS:
        return bounds.padded(budget, text, name, args, named)
    return function(*args, **named)


def _check_format(budget: Budget, text: str, args: tuple[Any, ...], named: Any) -> None:
    maps = [list(a.values()) for a in args if isinstance(a, dict)]
    bounds.check_format(budget, text, [*args, *named.values(), *(v for m in maps for v in m)])


def _guarded(function: Any, name: str) -> Any:
    """A filter or test of Jinja's, which counts what it is given and what it gives."""
    wants = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @wraps(function)
    def call(context: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.take()
        value = args[0] if name in LAZY else budget.measured(args[0])
        args = (value, *map(budget.measured, args[1:]))
        budget.measured(list(kwargs.values()))
        contexts = {"context": context, "eval_context": context.eval_ctx,
                    "environment": context.environment}  # fmt: skip
        first = () if wants is None else (contexts[wants],)
        return budget.written(function(*first, *args, **kwargs))

    return jinja2.pass_context(call)


def _bound(function: Callable[..., Any]) -> Any:
    """A filter of ours, which is given the budget."""

    def call(context: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.take()
        return function(budget, context, *args, **kwargs)

    return jinja2.pass_context(call)


def _join(budget: Budget, context: Any, value: Any, d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        options = {"attribute": attribute}
        value = context.environment.call_filter("map", value, kwargs=options, context=context)
    return budget.joined(value, budget.text(d))


def _sliced(budget: Budget, context: Any, value: Any, *ends: Any) -> Any:
    return budget.written(value[slice(*ends)])


def _trim(budget: Budget, _: Any, value: Any, chars: Any = None) -> str:
    text = budget.text(value)
    bounds.compared(budget, text, [chars])
    return text.strip(chars)


def _format(budget: Budget, _: Any, text: Any, *args: Any, **kwargs: Any) -> str:
    return bounds.formatted(budget, budget.text(text), kwargs or args)


def _now(form: str) -> str:
    if re.search(r"%\D?\d", form) or len(form) > bounds.WIDEST:
        raise CentellaError("strftime_now: expected a format without widths")
    return datetime.now().strftime(form)


_FILTERS: dict[str, Callable[..., Any]] = {
    "attr": lambda _, context, value, name: context.environment.getattr(value, name),
    "center": lambda budget, _, text, width=80: bounds.padded(
        budget, budget.text(text), "center", (width,), {}
    ),
    "counted": lambda budget, _, items: budget.counted(items),
    "format": _format,
    "indent": lambda budget, _, *args, **named: bounds.indented(budget, *args, **named),
    "int": lambda _, __, *args, **named: bounds.whole(*args, **named),
    "join": _join,
    "joined": lambda budget, _, parts: budget.joined(parts),
    "list": lambda budget, _, items: list(budget.counted(items)),
    "measured": lambda budget, _, value: budget.measured(value),
    "replace": lambda budget, _, text, old, new, count=None: bounds.replaced(
        budget, budget.text(text), budget.text(old), budget.text(new), count
    ),
    "round": lambda _, __, *args, **named: bounds.rounded(*args, **named),
    "sliced": _sliced,
    "string": lambda budget, _, value: budget.text(value),
    "trim": _trim,
    "tojson": lambda budget, _, *args, **named: bounds.as_json(budget, *args, **named),
}
