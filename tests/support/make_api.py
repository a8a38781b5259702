"""Make docs/api.md of the signatures and docstrings of the installed package.

python tests/support/make_api.py          # writes the page
"""

from __future__ import annotations

import importlib
import inspect
import operator
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import centella as ct  # noqa: E402
from tests.support.api_sections import GIVEN, INNER, INTRO, SECTIONS  # noqa: E402  # found on the path
from tests.support.docstrings import listed, outcome, parsed  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
WIDTH = 96  # of a signature on one line
VERSION = "The version of the package, a string."


class Text(str):
    """An annotation or a default as it is to be read: what `inspect` prints is its `repr`."""

    __slots__ = ()
    __repr__ = str.__str__


def object_of(name: str) -> Any:
    """What a name of the page means."""
    module, _, attribute = name.rpartition(":")
    if module:
        return getattr(importlib.import_module(module), attribute)
    return operator.attrgetter(name)(ct)


def shown(name: str) -> str:
    """A name as the page has it."""
    return name.rpartition(":")[2]


def signature(name: str, function: Any, *, bound: bool = False, width: int = 0) -> str:
    """A call as Python writes it, with annotations as the source has them."""

    def note(value: Any) -> Any:
        if value is inspect.Signature.empty:
            return value
        said = value.__name__ if inspect.isclass(value) else str(value)  # a Struct's are objects
        said = said.replace("numpy.ndarray[typing.Any, numpy.dtype[typing.Any]]", "Array")
        said = said.replace("numpy.ndarray[typing.Any, typing.Any]", "Array")
        return Text(re.sub(r"\b(?!ct\.)(?:[a-z_]\w*\.)+(?=[A-Z])", "", said))

    def default(value: Any) -> Any:
        said = f'"{value}"' if isinstance(value, str) else repr(value).replace("centella", "ct")
        return value if value is inspect.Parameter.empty else Text(said)

    asked = inspect.signature(function)
    returned = note("" if inspect.isclass(function) else asked.return_annotation)
    inner = inspect.unwrap(function)
    if inner is not function and inspect.isgeneratorfunction(inner):
        returned = Text(returned.replace("Iterator", "ContextManager"))
    if inspect.iscoroutinefunction(function):
        returned = Text(f"Awaitable[{returned}]")
    params = [
        p.replace(annotation=note(p.annotation), default=default(p.default))
        for p in list(asked.parameters.values())[bound:]
        if not (p.kind is p.VAR_KEYWORD and p.annotation == "Never")  # takes no argument
    ]
    call = f"{name}{inspect.Signature(params)}"
    arrow = f" -> {returned}" if returned else ""
    if not width or len(call + arrow) <= width:
        return call + arrow
    # Lines break between parameters alone.
    given = re.sub(r"(?<!,) |(?<=,) (?=[^\[]*\])", "\xa0", call[len(name) + 1 : -1])
    lines = textwrap.fill(given, width, initial_indent="    ", subsequent_indent="    ",
                          break_long_words=False, break_on_hyphens=False)  # fmt: skip
    return f"{name}(\n{lines},\n){arrow}".replace("\xa0", " ")


def members(name: str) -> dict[str, Any]:
    """The public methods and properties of a class, as they stand in it or in a base."""
    cls, inner = object_of(name), INNER.get(shown(name), "").split()
    bases = [base for base in cls.__mro__ if base.__module__.startswith("centella")]
    attributes: dict[str, Any] = {}
    for base in reversed(bases):
        attributes |= vars(base)
    if issubclass(cls, ct.nn.Module) and cls is not ct.nn.Module:  # which stands on the page
        attributes = {
            n: m for n, m in attributes.items() if n == "forward" or n not in vars(ct.nn.Module)
        }
    kinds = (classmethod, staticmethod, property)
    return {
        n: m
        for n, m in sorted(attributes.items(), key=lambda pair: (pair[0] != "__call__", pair[0]))
        if (n == "__call__" or not n.startswith("_")) and n not in inner
        if inspect.isfunction(m) or isinstance(m, kinds)
    }


def member(owner: str, name: str, what: Any) -> Iterator[str]:
    """A method or property of a class, as a list item."""
    bare, bound = getattr(what, "fget", None), getattr(object_of(owner), name)
    if bare is not None:
        header, params = f".{name}: {inspect.signature(bare).return_annotation}", set[str]()
    else:
        label = (
            f"{shown(owner)}.{name}" if isinstance(what, classmethod | staticmethod) else f".{name}"
        )
        header = signature(label, bound, bound=inspect.isfunction(what))
        params = set(inspect.signature(bound).parameters)
    yield from item(header, inspect.getdoc(bound), params)


def item(header: str, text: str | None, params: set[str]) -> Iterator[str]:
    """A list item: a signature and what a docstring says."""
    doc = parsed(text or "")
    yield f"- `{header}`: {' '.join(doc.prose)}"
    yield from (f"  - {entry}" for entry in (*listed(doc, "Args", params), *outcome(doc)))


def entry_of(name: str) -> Iterator[str]:
    """The lines of a name: an item for a short one, else a part with a heading."""
    what, text = object_of(name), inspect.getdoc(object_of(name)) or ""
    doc, is_class = parsed(text), inspect.isclass(what)
    if inspect.isroutine(what) and "Args" not in doc.sections:
        yield from item(signature(f"ct.{name}", what), text, set())
        return
    if not is_class and not inspect.isroutine(what) and what is not ct.nn:
        yield from item(f"ct.{name}", VERSION if isinstance(what, str) else text, set())
        return
    yield from ("", f"### {shown(name)}", "")
    arguments: list[str] = []
    if (is_class or inspect.isroutine(what)) and shown(name) not in GIVEN.split():
        call = shown(name) if ":" in name else f"ct.{name}"
        yield from ("```py", signature(call, what, width=WIDTH), "```", "")
        arguments = list(listed(doc, "Args", set(inspect.signature(what).parameters)))
    yield "\n\n".join(doc.prose)
    yield from ("", *(f"- {entry}" for entry in arguments))
    for paragraph in outcome(doc):
        yield from ("", paragraph)
    its = [f"- {entry}" for entry in listed(doc, "Attributes", mark=".")]
    for key, value in members(name).items() if is_class else ():
        its += member(name, key, value)
    if its:
        yield from ("", *(["Attributes and methods:", ""] if arguments else []), *its)


def rows(names: list[str]) -> Iterator[str]:
    """Dtypes or errors as a table."""
    if isinstance(object_of(names[0]), ct.DType):
        yield from (
            "| name | bytes | kind | on the host | in a kernel | round-off |",
            "|" + "---|" * 6,
        )
        for name in names:
            d = object_of(name)
            near = f"{d.epsilon:.2g}" if d.epsilon else ""
            yield f"| `ct.{name}` | {d.itemsize} | {d.kind} | `{d.numpy}` | {d.value} | {near} |"
    else:
        yield from ("| name | also a | when |", "|---|---|---|")
        for name in names:
            bases = [
                f"`{b.__name__}`" for b in object_of(name).__bases__ if b is not ct.CentellaError
            ]
            yield f"| `ct.{name}` | {', '.join(bases)} | {summary(name)} |"


def summary(name: str) -> str:
    """The first paragraph of a docstring, in a line."""
    return " ".join((inspect.getdoc(object_of(name)) or "").partition("\n\n")[0].split())


def in_table(name: str) -> bool:
    """Whether a name is a row of a table."""
    what = object_of(name)
    error = inspect.isclass(what) and issubclass(what, ct.CentellaError)
    return error or isinstance(what, ct.DType)


def page() -> str:
    """The text of docs/api.md."""
    index, body = [], []
    for title, intro, text in SECTIONS:
        names = text.split()
        anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        index.append(f"- [{title}](#{anchor}): {', '.join(f'`{shown(n)}`' for n in names)}")
        body += ["", f"## {title}", "", *([intro, ""] if intro else [])]
        tabled = [name for name in names if in_table(name)]
        entries = [list(entry_of(name)) for name in names if name not in tabled]
        for lines in sorted(entries, key=lambda lines: lines[0] == ""):  # short ones first
            body += lines
        body += ["", *rows(tabled)] if tabled else []
    return re.sub(r"\n{3,}", "\n\n", "\n".join([INTRO, *index, *body, ""]))


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
