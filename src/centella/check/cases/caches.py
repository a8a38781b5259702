"""The rows of operations on caches of keys and values."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from centella.check.cases.case import (
    FLOATS,
    LAYOUTS,
    Case,
    In,
    Row,
    Shape,
)
from centella.ops.matmul.problem import LinearAttrs
from centella.ops.rope_attend import RopeAttendAttrs


def cache_write() -> Row:
    """One token and many; rows in chunks, in words, odd; what passes the capacity is dropped."""

    def case(shape: Shape, tokens: int, high: int, layout: str = "plain") -> Case:
        caches = (In(shape, layout="state"),) * 2
        new = In((*shape[:2], tokens, shape[3]), layout=layout)
        return Case((*caches, new, replace(new, layout="plain"), In(shape[:1], (0, high), "i32")))

    all_cases = [case((2, 3, 7, d), t, 8 - t) for d in (1, 5, 16, 64) for t in (1, 3)]
    all_cases += [case((3, 1, 4, 8), 4, 1), case((3, 2, 5, 6), 3, 7), case((1, 2, 5, 8), 0, 5)]
    all_cases += [case((2, 2, 9, 8), 4, 5, x) for x in LAYOUTS[1:]]
    all_cases += [
        Case((*(In((2, blocks, 4, d), layout="state"),) * 2, *(In((1, 2, t, d), layout=x),) * 2,
              In((1, 1 + width), "apart", "i32")))
        for blocks, width, t, d, x in (
            (6, 5, 7, 8, "plain"), (3, 4, 9, 5, "plain"), (4, 3, 3, 16, "pads"),
            (9, 7, 1, 8, "plain"),
        )
    ]  # fmt: skip
    extremes = In((1, 1, 21, 1), "extremes")
    all_cases += [
        Case(
            (
                *(In((1, 1, 23, 1), layout="state"),) * 2,
                extremes,
                extremes,
                In((1,), (0, 2), "i32"),
            ),
            dtypes=FLOATS,
        )
    ]
    return Row((*FLOATS, "i8"), tuple(all_cases), exact=True)


def rope_cache_write() -> Row:
    """Both pairings, with norms and without; chunks, words, odd; past the capacity, the tables."""

    def case(
        b: int, heads: int, kv: int, tokens: int, d: int, half: int, norm: bool = False,
        high: int = 5, interleaved: bool = False, layout: str = "plain", values: Any = "normal",
        **more: Any,
    ) -> Case:  # fmt: skip
        caches = (In((b, kv, 7, d), layout="state"),) * 2
        x = In((b, heads + 2 * kv, tokens, d), values, layout=layout)
        tables = (In((9, half), dtype="f32"),) * 2
        norms = (In((2, d), dtype="" if d % 8 else "f32"),) if norm else ()
        attrs = {"interleaved": interleaved, "eps": 1e-3}
        return Case((*caches, x, *tables, In((b,), (0, high), "i32"), *norms), attrs, **more)

    all_cases = [case(2, 4, 2, t, d, half, norm) for d, half in ((16, 8), (6, 2), (5, 2))
            for t in (1, 3) for norm in (False, True)]  # fmt: skip
    all_cases += [case(2, 6, 3, 3, d, 4, norm, interleaved=True) for d in (16, 10)
             for norm in (False, True)]  # fmt: skip
    all_cases += [case(2, 6, 3, 3, d, 4, True, interleaved=True, layout="pads") for d in (10, 20)]
    all_cases += [
        case(1, 8, 8, 1, 64, 32),
        case(2, 6, 2, 5, 64, 32, True, 3),
        case(3, 1, 1, 4, 24, 8, True, 9),
        case(0, 2, 1, 1, 8, 4),
    ]
    all_cases += [case(2, 2, 1, 3, 8, 4, True, layout=x, sweep=True) for x in LAYOUTS[1:]]
    all_cases += [case(2, 4, 2, 3, 16, 8, norm, values="large") for norm in (False, True)]
    attrs = {"interleaved": False, "eps": 1e-3}
    for d, norm in ((16, True), (6, False)):
        pools, tables = (In((2, 5, 4, d), layout="state"),) * 2, (In((9, 2), dtype="f32"),) * 2
        table = In((1, 7), "apart", "i32")  # two sequences may not have one block
        norms = (In((2, d), dtype="f32"),) if norm else ()
        all_cases += [Case((*pools, In((1, 8, 5, d)), *tables, table, *norms), attrs)]
    return Row(FLOATS, tuple(all_cases), sums=True)


def rope_attend() -> Row:
    """Both ways: parts without a key, several tokens, shared keys, norms, windows, blocks."""

    def case(
        b: int, heads: int, kv: int, tokens: int, d: int, half: int, variant: str,
        capacity: int = 150, norm: bool = False, interleaved: bool = False, **more: Any,
    ) -> Case:  # fmt: skip
        caches = (In((b, kv, capacity, d), layout="state"),) * 2
        values, layout = more.pop("values", "normal"), more.pop("layout", "plain")
        x = In((b, heads + 2 * kv, tokens, d), values, layout=layout)
        tables = (In((capacity, half), dtype="f32"),) * 2
        norms = (In((2, d), dtype="f32"),) if norm else ()
        sight: dict[str, Any] = {
            name: more.pop(name) for name in ("window", "softcap") if name in more
        }
        attrs: dict[str, Any] = {"interleaved": interleaved, "eps": 1e-3, "scale": 0.02 * d**-0.5}
        starts = In((b,), (0, capacity - tokens + 1), "i32")
        attrs |= {"variant": variant, **sight}
        return Case((*caches, x, *tables, starts, *norms), attrs, **more)

    def table(d: int, tokens: int, variant: str, **sight: Any) -> Case:
        pools, tables = (In((2, 5, 64, d), layout="state"),) * 2, (In((200, d // 2), dtype="f32"),)
        attrs = {
            "interleaved": False,
            "eps": 1e-3,
            "scale": 0.02 * d**-0.5,
            "variant": variant,
            **sight,
        }
        return Case((*pools, In((1, 8, tokens, d)), *tables * 2, In((1, 4), (1, 5), "i32"),
                     In((2, d), dtype="f32")), attrs)  # fmt: skip

    sixteen: dict[str, Any] = {"dtypes": ("f16", "bf16")}
    all_cases = [case(2, 4, 2, 1, 16, 8, "apart"), case(1, 2, 1, 5, 6, 2, "apart", 9, norm=True),
            case(2, 4, 2, 3, 8, 4, "apart", window=4, softcap=2.0),
            table(8, 3, "apart")]  # fmt: skip
    all_cases += [
        case(2, 4, 2, 1, 16, 8, "cluster", **sixteen),
        case(3, 4, 1, 2, 64, 32, "cluster", 700, norm=True, **sixteen),
        case(2, 2, 2, 7, 24, 8, "cluster", 90, norm=True, **sixteen),
        case(1, 6, 2, 1, 40, 20, "cluster", 300, interleaved=True, **sixteen),
        case(2, 4, 2, 2, 16, 8, "cluster", window=20, softcap=2.0, norm=True, **sixteen),
        case(1, 2, 1, 1, 128, 64, "cluster", 60, layout="pads", norm=True, **sixteen),
        case(70, 4, 2, 1, 16, 8, "cluster", 70, sweep=True, **sixteen),
    ]
    all_cases += [
        case(2, 4, 2, 1, 16, 8, "split", dtypes=("f32",)),
        case(3, 6, 2, 1, 24, 8, "split", 700, norm=True, window=90, dtypes=("f32",)),
        replace(table(16, 1, "split", softcap=2.0), dtypes=("f32",)),
        case(2, 4, 2, 1, 64, 32, "split_mma", 300, **sixteen),
        # Outliers in x: a norm takes them from q and k, and values keep theirs.
        case(2, 4, 2, 1, 16, 8, "split", norm=True, values="large", dtypes=("f32",)),
        case(2, 4, 2, 1, 16, 8, "split_mma", 300, norm=True, values="large", **sixteen),
        case(2, 4, 2, 1, 16, 8, "cluster", norm=True, values="large", **sixteen),
        case(1, 6, 2, 3, 16, 8, "split_mma", norm=True, window=20, **sixteen),
    ]
    all_cases += [replace(table(d, n, "cluster", **sight), dtypes=("f16", "bf16"))
             for d, n, sight in ((16, 1, {}), (128, 2, {"window": 70}))]  # fmt: skip
    for variant in ("ring", "ring_split"):
        all_cases += [
            case(2, 4, 2, 1, 48, 24, variant, norm=True, **sixteen),
            case(3, 4, 1, 2, 64, 32, variant, 1700, norm=True, **sixteen),
            case(1, 6, 2, 2, 80, 40, variant, 300, window=70, softcap=2.0, **sixteen),
            case(1, 2, 1, 1, 128, 64, variant, 6000, layout="pads", interleaved=True, **sixteen),
            case(2, 4, 2, 1, 16, 8, variant, norm=True, values="large", **sixteen),
            case(70, 16, 4, 1, 128, 64, variant, 700, sweep=True, **sixteen),
            replace(table(128, 2, variant, window=100), dtypes=("f16", "bf16")),
        ]
    return Row(FLOATS, tuple(all_cases), sums=True)


def attend_linear() -> Row:
    """Parts that a product adds up: one of a plan's, all, of windows; fewer heads than threads."""

    def case(
        heads: int, kv: int, d: int, n: int, capacity: int, extras: tuple[str, ...] = (),
        norm: bool = False, start: tuple[int, int] | None = None, blocks: bool = False,
        **more: Any,
    ) -> Case:  # fmt: skip
        f32: dict[str, Any] = {"dtype": "f32"}
        shape, starts = (1, kv, capacity, d), In((1,), start or (0, capacity), "i32")
        if blocks:
            shape, starts = (kv, 5, 64, d), In((1, 4), (1, 5), "i32")
        given: tuple[In, ...] = (In(shape, layout="state", **f32),) * 2
        given += (In((1, heads + 2 * kv, 1, d), **f32), *(In((capacity, d // 2), **f32),) * 2)
        given += (starts, *((In((2, d), **f32),) if norm else ()), In((n, heads * d)))
        shapes = {"bias": (n,), "residual": (1, 1, n)}
        given += tuple(In(shapes[name], **f32) for name in extras)
        sight = {name: more.pop(name) for name in ("window", "softcap") if name in more}
        attend = RopeAttendAttrs(False, 1e-3, 0.02 * d**-0.5, **sight)
        after = {name: more.pop(name) for name in ("alpha", "dtype") if name in more}
        linear = LinearAttrs(extras, more.pop("activation", ""), **after)
        return Case(given, {"attend": attend, "linear": linear, "variant": "combined"}, **more)

    both = ("bias", "residual")
    all_cases = [
        case(4, 2, 16, 24, 150, both, norm=True),
        case(16, 8, 128, 20, 768, ("residual",), norm=True, start=(600, 768)),
        case(6, 2, 24, 9, 700, both, alpha=0.5, activation="silu"),
        case(2, 1, 64, 40, 300, ("residual",), window=90, softcap=2.0, start=(200, 300)),
        case(8, 2, 32, 33, 320, ("residual",), norm=True, blocks=True),
        case(1, 1, 8, 3, 64, start=(0, 1)),
        case(2, 2, 32, 21, 130, both, dtype="f16"),
        case(1, 1, 64, 1100, 128, ("residual",), norm=True),
        case(3, 3, 40, 17, 1000, ("bias",), start=(900, 1000)),
    ]
    all_cases += [case(2, 1, 16, 10, 300, both, start=(n, n + 1), sweep=True)
                  for n in (0, 62, 63, 64, 127, 128, 255, 256, 299)]  # fmt: skip
    return Row(FLOATS, tuple(all_cases), sums=True)


def _in_i8(shape: Shape) -> tuple[In, ...]:
    """The States of a cache in i8."""
    rows = In(shape, (-127, 128), "i8", layout="state")
    return rows, rows, In((*shape[:-1], 2), dtype="f32", layout="state")


def cache_attend() -> Row:
    """Heads in chunks; caches empty, filled in part, full, and longer than a group has threads."""
    all_cases = []
    for b, h, capacity, d, high in (
        (1, 1, 1, 8, 1), (2, 3, 7, 16, 7), (2, 2, 40, 64, 40), (3, 1, 300, 32, 300),
        (1, 2, 448, 128, 448), (2, 1, 5, 24, 9),
    ):  # fmt: skip
        caches = (In((b, h, capacity, d), layout="state"),) * 2
        row = In((b, h, 1, d))
        case = Case((*caches, row, row, row, In((b,), (0, high), "i32")), {"scale": d**-0.5})
        all_cases.append(case)
    turned = In((2, 3, 1, 16), layout="transposed")
    all_cases.append(
        replace(all_cases[1], inputs=(*all_cases[1].inputs[:2], turned, *all_cases[1].inputs[3:]))
    )
    return Row(FLOATS, tuple(all_cases), sums=True)


def cache_write_i8() -> Row:
    """One token and many; rows in chunks, in words, odd; past the capacity; blocks; zeros."""

    def case(shape: Shape, tokens: int, high: int, layout: str = "plain", **more: Any) -> Case:
        new = In((*shape[:2], tokens, shape[3]), layout=layout)
        starts = In(shape[:1], (0, high), "i32")
        return Case((*_in_i8(shape), new, replace(new, layout="plain"), starts), **more)

    all_cases = [case((2, 3, 7, d), t, 8 - t) for d in (1, 6, 16, 20, 64) for t in (1, 3)]
    all_cases += [case((2, 2, 9, 8), 4, 5, x, sweep=True) for x in LAYOUTS[1:]]
    all_cases += [
        Case((*_in_i8((2, blocks, 4, d)), *(In((1, 2, t, d)),) * 2,
              In((1, 1 + width), "apart", "i32")))
        for blocks, width, t, d in ((6, 5, 7, 8), (3, 4, 9, 5), (9, 7, 1, 32))
    ]  # fmt: skip
    return Row(FLOATS, tuple(all_cases), sums=True)


def rope_cache_write_i8() -> Row:
    """The cases of `rope_cache_write`, into rows of 8 bits with scales."""

    def case(
        b: int, kv: int, tokens: int, d: int, half: int, norm: bool = False, high: int = 5
    ) -> Case:
        x = In((b, 3 * kv, tokens, d))
        tables = (In((9, half), dtype="f32"),) * 2
        attrs = {"interleaved": half % 2 == 1, "eps": 1e-3}
        starts = In((b,), (0, high), "i32")
        norms = (In((2, d), dtype="f32"),) if norm else ()
        return Case((*_in_i8((b, kv, 7, d)), x, *tables, starts, *norms), attrs)

    all_cases = [case(2, 2, t, d, half, t == 3) for t in (1, 3)
            for d, half in ((16, 8), (6, 2), (5, 2), (24, 5), (64, 32))]  # fmt: skip
    all_cases += [case(3, 1, 4, 24, 8, high=9), case(0, 1, 1, 8, 4)]
    return Row(FLOATS, tuple(all_cases), sums=True)


def cache_step() -> Row:
    """A step's begin; positions set to lengths."""
    all_cases = [Case((In((2, b), (0, 50), layout="state"),), {"tokens": n})
            for b in (1, 3, 67) for n in (1, 5)]  # fmt: skip
    steps = In((2, 67), (0, 50), layout="state")
    lengths = In((67,), (0, 50))
    all_cases += [
        Case((steps, replace(lengths, layout=x)), {"tokens": 0}) for x in ("plain", "offset")
    ]
    return Row(("i32",), tuple(all_cases), exact=True)


def cache_copy() -> Row:
    """Rows in chunks, in words, odd; whole blocks and parts of them; pools of both kinds."""

    def case(blocks: int, size: int, d: int, copies: int) -> Case:
        pools = (In((2, blocks, size, d), layout="state"),) * 2
        # Not all rows alike: no two may copy to one block.
        return Case((*pools, In((copies, 3), "apart", "i32", "pads")))

    all_cases = [case(9, 4, d, 3) for d in (1, 5, 16, 64)] + [case(5, 7, 8, 3), case(4, 3, 10, 1)]
    return Row((*FLOATS, "i8"), tuple(all_cases), exact=True)


def cache_copy_i8() -> Row:
    """As `cache_copy`, with scales."""
    all_cases = [
        Case((*_in_i8((2, blocks, size, d)), In((copies, 3), "apart", "i32", "pads")))
        for blocks, size, d, copies in ((9, 4, 16, 3), (9, 3, 5, 3), (4, 7, 64, 2))
    ]
    return Row(("f32",), tuple(all_cases), exact=True)


def beam_blocks() -> Row:
    """One beam and many; tables of one block and of several; positions within and past them."""
    all_cases = [
        Case((In((p * b, 1 + w), "apart", "i32", "state"), In((p * b,), (0, p * b), "i32")),
             {"beam": b, "size": size})
        for p, b, w, size in (
            (1, 1, 1, 4), (2, 3, 2, 5), (3, 4, 4, 16), (1, 16, 5, 64), (2, 7, 40, 8), (1, 5, 3, 1),
        )
    ]  # fmt: skip
    return Row(("i32",), tuple(all_cases), exact=True)
