"""The rows of operations along rows: reductions, softmax, norms, pooling."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from centella.check.cases.case import (
    DEPTH,
    FLOATS,
    INTEGERS,
    LAYOUTS,
    NUMBERS,
    Case,
    In,
    Row,
    Shape,
    cases,
    laid_out,
)
from centella.ops.speech_host import NOTES

ROWS_OF: tuple[Shape, ...] = (
    *((1,), (5,), (3, 5), (5, 8), (7, 1), (2, 3, 7), (2, 67), (3, 260), (0, 4)),
)
FEW: tuple[Shape, ...] = ((21, 1), (7, 3), (21,))  # rows of extremes


def reduce() -> Row:
    """Rows short and long, split among groups; sums of integers wrap in 32 bits."""
    all_cases: list[Case] = []
    for op in ("sum", "mean", "max", "min"):
        dtypes = FLOATS if op == "mean" else ()
        all_cases += cases(ROWS_OF, attrs={"op": op}, dtypes=dtypes)
        all_cases += laid_out(Case((In((6, 5)),), {"op": op}, dtypes), *LAYOUTS[1:])
        few = FEW if op in ("max", "min") else FEW[:1]  # 6e4 - 6e4 + 1e-3 is no sum to compare
        all_cases += cases(few, "extremes", {"op": op}, dtypes=FLOATS)
        all_cases += cases([(3, 16385)], attrs={"op": op}, dtypes=dtypes)
        all_cases.append(
            Case((In((3, 16385), layout="transposed"),), {"op": op}, dtypes, small=False)
        )
        all_cases += cases([(2, 3, 33000)], attrs={"op": op}, dtypes=dtypes, small=False)
    all_cases += [Case((In((3, 0)),), {"op": "sum"}), Case((In((3, 0)),), {"op": "mean"}, FLOATS)]
    return Row(NUMBERS, tuple(all_cases), sums=True)


def argmax() -> Row:
    """Ties, NaN, infinities; long rows."""
    all_cases = [*cases(ROWS_OF), *cases([(3, 40), (64,)], "ties", dtypes=FLOATS)]
    all_cases += laid_out(Case((In((6, 5)),)), *LAYOUTS[1:])
    all_cases += cases(FEW, "extremes", dtypes=FLOATS)
    all_cases += cases([(3, 16385)])
    all_cases += cases([(2, 3, 33000)], "ties", dtypes=FLOATS, small=False)
    all_cases += [Case((In((2, 300), (0, 2)),), dtypes=INTEGERS)]
    all_cases += cases(FEW, "extremes", attrs={"marked": True}, dtypes=FLOATS)
    all_cases += cases([(2, 33000)], attrs={"marked": True}, dtypes=FLOATS)
    return Row(NUMBERS, tuple(all_cases))


def topk() -> Row:
    """Ties, NaN, infinities; one of one, all of a row, few and many of a long one; odd k."""
    all_cases = [Case((In(s),), {"k": min(k, s[-1])}) for s in ROWS_OF for k in (1, 3, 8)]
    all_cases += cases([(3, 40), (64,)], "ties", {"k": 7}, dtypes=FLOATS)
    all_cases += laid_out(Case((In((6, 5)),), {"k": 3}), *LAYOUTS[1:])
    all_cases += cases([(21,)], "extremes", {"k": 21}, dtypes=FLOATS)
    all_cases += cases([(2, 4099)], attrs={"k": 64}, dtypes=FLOATS, small=False)
    all_cases += cases([(2, 9001)], attrs={"k": 10}, dtypes=FLOATS)
    all_cases += cases([(3, 20_003)], "ties", {"k": 100}, dtypes=FLOATS, small=False)
    all_cases += [Case((In((2, 300), (0, 2)),), {"k": 9}, dtypes=INTEGERS)]
    return Row(NUMBERS, tuple(all_cases), exact=True)


def argsort() -> Row:
    """Ties, NaN, infinities; several rows a block; blocks that are merged; both directions."""
    all_cases = [
        *cases(ROWS_OF),
        *cases([(3, 40), (64,), (300, 3), (3, 1025)], "ties", dtypes=FLOATS),
    ]
    all_cases += cases(FEW, "extremes", dtypes=FLOATS)
    all_cases += [replace(case, attrs={"descending": True}) for case in all_cases]
    all_cases += laid_out(Case((In((6, 5)),)), *LAYOUTS[1:])
    all_cases += cases([(2, 5000), (3, 9001)], "ties")
    all_cases += cases([(2, 40_000)], attrs={"descending": True}, small=False)
    all_cases += [Case((In((2, 300), (0, 2)),), dtypes=INTEGERS)]
    return Row(NUMBERS, tuple(all_cases), exact=True)


def cumsum() -> Row:
    """Rows short and long, some split among groups; sums of integers wrap in 32 bits."""
    all_cases = [*cases(ROWS_OF), *cases([(2, 1025), (300, 3)], "positive")]
    all_cases += laid_out(Case((In((6, 5)),)), *LAYOUTS[1:])
    all_cases += cases([(21, 1)], "extremes", dtypes=FLOATS)
    all_cases += cases([(2, 16_385), (2, 40_000)], small=False)
    return Row(NUMBERS, tuple(all_cases), sums=True)


def sample() -> Row:
    """Short and long vocabularies; settings at random, each of a few sequences; values of 800."""
    all_cases = []
    for b, v in ((1, 1), (2, 7), (3, 256), (2, 1003), (1, 5003)):
        for values in ("normal", "large"):
            states = (In((b, v), (0, 3), "i32", "state"), In((b,), (0, 999), "i32", "state"))
            rest = (In((b, v), values), In((b, 7), "positive"), In((b,), (0, 1 << 30), "i32"))
            all_cases.append(Case((*states, *rest)))
    states = (In((5, 300), (0, 3), "i32", "state"), In((5,), (0, 999), "i32", "state"))
    rest = (In((3, 300)), In((5, 7), "positive"), In((5,), (0, 1 << 30), "i32"))
    slots = In((3,), "apart", "i32")
    all_cases.append(Case((*states, *rest, slots)))
    for variant in ("group", "cluster_rows", "slices"):
        all_cases.append(Case((*states, *rest, slots), {"variant": variant}))
        all_cases += [replace(c, attrs={"variant": variant}) for c in all_cases[4:9:2]]
    return Row(("f32",), tuple(all_cases), exact=True)


def beam_select() -> Row:
    """Few candidates and many; ties, NaN, infinities; most have ended, and none."""

    def case(p: int, k: int, b: int, v: int, values: str, ends: tuple[int, int]) -> Case:
        kinds = ((0, v), "i32"), ((0, b), "i32"), ("normal", "f32")
        states = (In((p * b,), values, dtype, "state") for values, dtype in kinds)
        codes = In((p, k), (0, b * v), "i32")
        return Case((*states, In((p, k), values), codes, In((v,), ends, "i32")))

    all_cases = [
        case(*sizes, values, ends)
        for sizes in ((1, 1, 1, 5), (3, 8, 4, 50), (2, 21, 3, 7), (2, 128, 16, 1000))
        for values in ("normal", "ties", "large") for ends in ((0, 2), (0, 1), (-1, 1))
    ]  # fmt: skip
    all_cases.append(case(1, 21, 9, 30, "extremes", (0, 2)))
    return Row(("f32",), tuple(all_cases), exact=True)


def speech_token() -> Row:
    """Vocabularies of one part and of several; texts at their begin, after times, and ended."""
    all_cases = []
    for b, v in ((1, 9), (2, 40), (5, 256), (3, 1003), (2, 9001)):
        zero = v - v // 3
        attrs = {"end": v // 2, "zero": zero, "no_timestamps": zero - 1, "latest": zero + v // 5}
        states = (In((b, 6), (0, 2), "i32", "state"), In((b, 2), "positive", layout="state"))
        token = In((b, 1), (0, v), "i32", "state")
        rest = (token, In((b, v)), In((v,), (0, 3), "i32"))
        for timed in (False, True):
            for random in (False, True):
                how = {**attrs, "timed": timed, "random": random}
                all_cases.append(Case((*states, *rest), how))
    return Row(("f32",), tuple(all_cases), sums=True)


def speech_scores() -> Row:
    """As `speech_token`."""
    all_cases = []
    for case in speech_token().cases:
        if not case.attrs["random"]:
            notes, _, _, scores, levels = case.inputs
            all_cases.append(Case((scores, levels, replace(notes, layout="plain")), case.attrs))
    return Row(("f32",), tuple(all_cases), exact=True)


def speech_beams() -> Row:
    """As `speech_token`; the beams of one window and of several; tokens that are equally likely."""
    all_cases = []
    for case in speech_token().cases:
        if not case.attrs["random"]:
            *_, logits, levels = case.inputs
            b, v = logits.shape
            for w, beam in {(1, b), (b, 1), (2, b)}:
                known = In((w, beam, 6), (0, 2), "i32"), In((w, beam))
                for values in ("normal", "ties"):
                    all_cases.append(Case((In((w, beam, v), values), levels, *known), case.attrs))
    return Row(("f32",), tuple(all_cases), sums=True)


def speech_move() -> Row:
    """One beam and many; slots of few words and of many; new ones within and past them; ties."""

    def state(shape: tuple[int, ...], values: Any, dtype: str = "i32") -> In:
        return In(shape, values, dtype, "state")

    all_cases = []
    sizes = (1, 1, 9, 1), (2, 3, 9, 6), (3, 5, 70, 10), (1, 16, 40, 32), (2, 21, 33, 128)
    for w, b, slots, count in (*sizes, (2, 2, 2061, 5)):
        rows, note = w * b, (w * b, len(NOTES))
        seen = state((rows, slots), "bools", "bool"), state(note, (0, 2)), state((w, 2), (0, slots))
        went = (state((rows,), (0, 9)), state((rows,), (0, b)), state((rows,), "normal", "f32"))
        attrs = {"beam": b, "vocab": 40, "end": 7, "zero": 20}
        for values in ("normal", "ties"):
            best = In((w, count), values, "f32"), In((w, count), (0, b * 40), "i32")
            all_cases.append(Case((*seen, *went, *best), attrs))
    return Row(("f32",), tuple(all_cases), exact=True)


def dot() -> Row:
    """Vectors short and long."""
    all_cases = [Case((In((n,)), In((n,)))) for n in (0, 1, 7, 255, 257)]
    all_cases += laid_out(all_cases[3], "offset", "strided")
    all_cases += [Case((In((n,)), In((n,)))) for n in (16385, 50021)]
    all_cases += [Case((In((257,), "large"), In((257,), "large")), dtypes=FLOATS)]
    all_cases += [Case((In((9,), "hidden"), In((9,))), dtypes=FLOATS)]
    return Row(NUMBERS, tuple(all_cases), sums=True)


def softmax() -> Row:
    """Both forms; values of 800; rows of one value."""
    all_cases: list[Case] = []
    for attrs in ({}, {"log": True}):
        all_cases += cases(ROWS_OF, attrs=attrs)
        all_cases += cases([(5, 33), (3, 8)], "large", attrs)
        all_cases += cases(FEW, "extremes", attrs)
        all_cases += cases([(3, 2100)], attrs=attrs)
    all_cases += laid_out(Case((In((6, 5)),)), *LAYOUTS[1:])
    return Row(FLOATS, tuple(all_cases), sums=True)


def norm() -> Row:
    """Each kind, with and without vectors; values of 800 among small ones."""
    all_cases: list[Case] = []
    for kind, vectors in (
        *(("layer", ()), ("layer", ("weight", "bias")), ("layer", ("bias",))),
        *(("rms", ()), ("rms", ("weight",)), ("l2", ())),
    ):
        attrs = {"kind": kind, "eps": 1e-5, "vectors": vectors}
        rows = ROWS_OF if len(vectors) < 2 and vectors != ("bias",) else ROWS_OF[2:5]
        for shape in (*rows, (3, 2100)):
            all_cases.append(Case((In(shape), *(In(shape[-1:]) for _ in vectors)), attrs))
        all_cases.append(Case((In((7, 3), "extremes"), *(In((3,)) for _ in vectors)), attrs))
        both = tuple(In((33,)) for _ in vectors)
        all_cases.append(Case((In((5, 33), "large"), *both), attrs))
    attrs = {"kind": "rms", "eps": 1e-6, "vectors": ("weight",)}
    some = Case((In((6, 5)), In((5,), layout="offset")), attrs)
    all_cases += [some, *laid_out(some, *LAYOUTS[1:])]
    all_cases += [Case((In((6, 5)), In((5,), dtype="f32")), attrs)]
    return Row(FLOATS, tuple(all_cases), sums=True)


def mean_pool() -> Row:
    """Lengths of 0, within, beyond."""
    all_cases = [
        Case((In((b, n, d)), In((b,), (-1, n + 3), "i32")))
        for b, n, d in ((1, 1, 1), (3, 5, 7), (4, 7, 8), (2, 33, 67), (2, 0, 3), (0, 3, 4))
    ]
    all_cases += laid_out(all_cases[1], *LAYOUTS[1:])
    all_cases += [  # of texts end to end
        Case((In((n, d)), In((texts + 1,), (-1, n + 3), "i32")))
        for n, d, texts in ((9, 5, 7), (33, 8, 3), (1, 67, 1), (5, 4, 0), (0, 4, 2))
    ]
    all_cases += [Case((In((7, 1, 3), "extremes"), In((7,), (0, 3), "i32")))]
    pair = (DEPTH - 1, DEPTH + 1)
    all_cases += [
        Case((In((2, DEPTH, 4), (0, 7)), In((2,), pair, "i32")), {}, ("f32",), small=False)
    ]
    return Row(FLOATS, tuple(all_cases), sums=True)
