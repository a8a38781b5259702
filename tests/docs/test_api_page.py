"""docs/api.md is what its script makes; every public name stands on it once, with its docstring."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter

import pytest

import centella as ct
from tests.support.api_sections import GIVEN, INNER, INTEGERS, SECTIONS
from tests.support.docstrings import listed, outcome, parsed
from tests.support.make_api import PAGE, members, object_of, page, shown, signature

NAMES = [name for _, _, names in SECTIONS for name in names.split()]


def public() -> set[str]:
    """The names that are to be on the page."""
    modules = {n: getattr(ct, n).__all__ for n in ("audio", "nn", "serving")}
    return {*ct.__all__, *(f"{module}.{n}" for module, names in modules.items() for n in names)}


def misplaced() -> set[str]:
    """Public names on no section, names on two, and names that are not public."""
    counts = Counter(name for name in NAMES if ":" not in name)
    return (public() ^ set(counts)) | {name for name, times in counts.items() if times > 1}


def undocumented(name: str) -> list[str]:
    """What of a name has no docstring: itself, a method, a property, a field of a Struct."""
    what = object_of(name)
    if isinstance(what, str):
        return []
    if not inspect.isclass(what):
        return [] if inspect.getdoc(what) else [name]
    bare = [] if what.__doc__ else [name]
    bare += [f"{name}.{n}" for n in members(name) if not inspect.getdoc(getattr(what, n))]
    said = " ".join(listed(parsed(inspect.getdoc(what) or ""), "Attributes"))
    fields = [n for n in getattr(what, "__struct_fields__", ()) if not n.startswith("_")]
    return bare + [f"{name}.{n}" for n in fields if f"`{n}`" not in said]


def test_the_page_is_what_the_script_makes() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python tests/support/make_api.py"


def test_every_public_name_stands_in_one_section() -> None:
    assert misplaced() == set()
    short_names = [shown(name) for name in NAMES if ":" in name]
    assert len(set(short_names)) == len(short_names)
    assert not {*short_names} & public()


def test_every_name_and_method_is_documented() -> None:
    assert [bare for name in NAMES for bare in undocumented(name)] == []


def absent(name: str) -> list[str]:
    """Attributes that the page lists, and the class neither defines, annotates nor sets."""
    what = object_of(name)
    entries = listed(parsed(inspect.getdoc(what) or ""), "Attributes", mark=".")
    said = {n for entry in entries for n in re.findall(r"`\.(\w+)`", entry.partition(": ")[0])}
    bases = [base for base in what.__mro__ if base.__module__.startswith("centella")]
    known = {n for base in bases for n in (*vars(base), *inspect.get_annotations(base))}
    known |= {n for base in bases for n in re.findall(r"self\.(\w+)", inspect.getsource(base))}
    return sorted(f"{name}.{n}" for n in said - known)


def test_every_attribute_of_the_page_exists() -> None:
    classes = [name for name in NAMES if inspect.isclass(object_of(name))]
    assert [lost for name in classes for lost in absent(name)] == []


def test_what_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ct, "__all__", [*ct.__all__, "fresh"])
    assert misplaced() == {"fresh"}
    monkeypatch.setattr(ct.State, "fresh", lambda self: None, raising=False)
    assert undocumented("State") == ["State.fresh"]
    assert PAGE.read_text("utf-8") != page()


def test_what_is_left_out_exists() -> None:
    for owner, names in INNER.items():
        for name in names.split():
            assert callable(getattr(object_of(owner), name)), f"{owner}.{name}"
    assert set(GIVEN.split()) <= {shown(name) for name in NAMES}


@pytest.mark.parametrize(("data", "wanted"), [([1, 2], INTEGERS), ([True, False], "cast")])
def test_what_takes_integers_and_bools(data: list[int], wanted: str) -> None:
    numbers = ct.asarray(data, device="cpu")
    others = {"cast": ("f32",), "scale": (2.0,), "clip": (0, 1)}
    (names,) = (names for title, _, names in SECTIONS if title == "Element-wise")
    taken = []
    for name in names.split():
        required = inspect.signature(getattr(ct, name)).parameters.values()
        pair = sum(p.default is p.empty for p in required) > 1
        rest = others.get(name, (numbers,) if pair else ())
        with contextlib.suppress(ct.DTypeError):
            getattr(ct, name)(numbers, *rest)
            taken.append(name)
    assert sorted(taken) == sorted(wanted.split())


def test_nothing_of_python_itself_shows() -> None:
    text = PAGE.read_text("utf-8")
    for word in ("object at 0x", "<class", "<function", "centella.f32", "NoneType", "'Tensor"):
        assert word not in text, word


def test_a_docstring_becomes_markdown() -> None:
    doc = parsed(
        "y = *x*, for `*x*` of <n>.\n\n    one()\n\n    two()\n\nAfter.\n\n"
        "Args:\n    x, y: [n],\n        of floats; z: [m]; other: a word.\n    w: no\n\n"
        "Returns:\n    [n],\n    both.\n\nRaises:\n    ShapeError: no; DTypeError: none.\n"
    )
    assert doc.prose == [
        r"y = \*x\*, for `*x*` of \<n>.",
        "```py\none()\n\ntwo()\n```",
        "After.",
    ]
    assert list(listed(doc, "Args", {"x", "y", "z", "w"})) == [
        "`x`, `y`: [n], of floats.",
        "`z`: [m]; other: a word.",
        "`w`: no",
    ]
    assert list(outcome(doc)) == [
        "**Returns** [n], both.",
        "**Raises** `ShapeError`: no; `DTypeError`: none.",
    ]


def test_a_signature_is_that_of_the_source() -> None:
    def example(
        x: ct.Tensor, /, pairs: dict[str, int] | None = None, *, dtype: ct.DType = ct.f32,
        kind: str = "none",
    ) -> tuple[int, ...]:  # fmt: skip
        return (len((x, pairs, dtype, kind)),)

    assert signature("f", example) == (
        "f(x: ct.Tensor, /, pairs: dict[str, int] | None = None, *, dtype: ct.DType = ct.f32, "
        'kind: str = "none") -> tuple[int, ...]'
    )
    assert signature("f", example, width=50) == (
        "f(\n    x: ct.Tensor, /,\n    pairs: dict[str, int] | None = None, *,\n"
        '    dtype: ct.DType = ct.f32, kind: str = "none",\n) -> tuple[int, ...]'
    )
    assert signature("f", ct.forbid) == "f(*kinds: str) -> ContextManager[None]"
    encode = ct.serving.Batcher.encode
    assert signature("f", encode, bound=True) == "f(text: str) -> Awaitable[Array]"
