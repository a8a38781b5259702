"""The rows of products: matmul, linear, convolution."""

from __future__ import annotations

from itertools import product

from msgspec.structs import replace

from centella.check.cases import planes
from centella.check.cases.case import DEPTH, FLOATS, LAYOUTS, Case, In, Row
from centella.ops.matmul.problem import LinearAttrs
from centella.ops.norm import NormAttrs
from centella.ops.quant.table import FORMATS

MATRICES: tuple[tuple[int, int, int], ...] = (
    (1, 1, 1),
    (5, 7, 3),
    (17, 33, 9),
    (33, 40, 64),
    (64, 16, 65),
    (130, 20, 70),
)
FEW: tuple[tuple[int, int, int], ...] = ((1, 1, 1), (33, 40, 64), (130, 20, 70))  # no sweep
VARIANTS: tuple[str, ...] = ("large", "medium", "small", "mma", "wgmma")
# Rows, depth, columns of thin products: depths of 1, prime, 1 more than whole chunks, whole blocks.
GEMV: tuple[tuple[int, int, int], ...] = (
    (1, 1, 1),
    (1, 7, 3),
    (1, 65, 33),
    (1, 257, 5),
    (1, 1024, 6),
    (1, 2048, 131),
)
SKINNY: tuple[tuple[int, int, int], ...] = (
    (2, 67, 33),
    (3, 1, 5),
    (4, 256, 9),
    (5, 13, 130),
    (8, 515, 7),
    (13, 61, 37),
    (16, 264, 8),
)
ON_CORES: tuple[tuple[int, int, int], ...] = ((2, 67, 33), (13, 61, 37), (20, 264, 8))


def tensor_cores() -> list[Case]:
    """`matmul` on tensor cores: depths around a stage and past the ring, layouts, batches."""
    forced = {"variant": "mma", "alpha": 0.5}
    cases = [Case((In((9, k)), In((k, 11))), forced) for k in (0, 2, 31, 32, 33, 63, 64, 129)]
    for la, lb in product(LAYOUTS, ("plain", "transposed", "offset")):
        cases.append(Case((In((33, 40), layout=la), In((40, 18), layout=lb)), forced))
    for x in LAYOUTS[3:]:
        cases.append(Case((In((20, 35)), In((35, 17), layout=x)), forced))
    for a, b in (((2, 3, 5, 7), (2, 3, 7, 4)), ((3, 5, 40), (40, 4)), ((5, 7), (3, 7, 4)),
                 ((2, 1, 3, 4), (3, 4, 2)), ((0, 3), (3, 2)), ((2, 3, 0), (2, 0, 5))):  # fmt: skip
        cases.append(Case((In(a), In(b)), forced))
    cases += [Case((In((5, 19), values), In((19, 9))), forced) for values in ("large", "hidden")]
    cases.append(Case((In((300, 200)), In((200, 260))), forced, small=False))
    return cases + warpgroups()


def warpgroups() -> list[Case]:
    """`matmul` by warpgroups: depths around a stage and past the ring, layouts, batches."""
    forced = {"variant": "wgmma", "alpha": 0.5}
    cases = [Case((In((9, k)), In((k, 16))), forced) for k in (0, 8, 63, 64, 65)]
    for la, lb in product(("plain", "transposed", "offset"), ("plain", "transposed")):
        cases.append(Case((In((40, 48), layout=la), In((48, 16), layout=lb)), forced))
    for a, b in (((2, 3, 9, 16), (2, 3, 16, 8)), ((3, 5, 40), (40, 8)), ((9, 16), (3, 16, 8)),
                 ((2, 1, 9, 8), (3, 8, 16)), ((0, 8), (8, 8))):  # fmt: skip
        cases.append(Case((In(a), In(b)), forced))
    cases.append(Case((In((19, 24), "large"), In((24, 9))), forced))
    one = {**forced, "variant": "streamed"}
    for k, n in ((128, 300), (264, 70)):  # more columns than rows, and fewer
        cases.append(Case((In((1, k)), In((k, n), layout="transposed")), one))
    for variant, m, n in (("streamed_rows", 2, 300), ("streamed_rows", 11, 70),
                          ("streamed_many", 17, 300), ("streamed_many", 50, 70)):  # fmt: skip
        few = {**forced, "variant": variant}
        cases.append(Case((In((m, 264)), In((264, n), layout="transposed")), few))
    cases.append(Case((In((300, 600)), In((600, 260))), forced, small=False))
    return cases


def fused_on_tensor_cores() -> list[Case]:
    """`linear` on tensor cores: what follows the product, odd columns, rows off 16 bytes."""
    forced = {"variant": "mma", "alpha": 0.5}
    every = {**forced, "extras": ("scale", "bias", "residual"), "activation": "gelu"}
    cases = []
    for m, n, k in ((5, 10, 24), (66, 33, 40), (17, 7, 9)):
        operands = (In((m, k)), In((n, k)), In((n,), "positive"), In((n,)), In((m, n)))
        cases += [Case(operands, every), Case(operands, {**every, "variant": "wgmma"})]
    one = {**forced, "variant": "streamed", "extras": ("bias", "residual"), "activation": "silu"}
    for n, k in ((9, 128), (70, 264), (33, 1024)):
        cases.append(Case((In((1, k)), In((n, k)), In((n,)), In((1, n))), one))
        several = (In((k % 16 + 3, k)), In((n, k)), In((n,)), In((k % 16 + 3, n)))
        cases.append(Case(several, {**one, "variant": "streamed_rows"}))
    for m, n, k, values in ((17, 9, 128, ""), (64, 70, 264, ""), (33, 133, 2048, "large")):
        rows = In((m, k), values) if values else In((m, k))
        several = (rows, In((n, k)), In((n,)), In((m, n)))
        cases.append(Case(several, {**one, "variant": "streamed_many"}))
    few = {**every, "variant": "skinny_mma"}
    for m, n, k in ((1, 33, 40), (5, 10, 24), (13, 37, 67), (20, 18, 264)):
        operands = (In((m, k)), In((n, k)), In((n,), "positive"), In((n,)), In((m, n)))
        cases.append(Case(operands, few))
    mixed = {**forced, "extras": ("bias", "residual"), "activation": "silu"}
    cases.append(Case((In((2, 3, 24)), In((5, 24)), In((5,), dtype="f32"), In((2, 3, 5))), mixed))
    plain = {**forced, "extras": (), "activation": ""}
    for x in LAYOUTS[1:]:
        cases.append(Case((In((20, 36), layout=x), In((5, 36))), plain))
        cases.append(Case((In((20, 36)), In((5, 36), layout=x)), plain))
    return cases


def linear_norm() -> Row:
    """Products joined to their norm: rows off every boundary, depths past the ring, layouts."""
    cases = []
    every, affine = ("bias", "residual"), ("weight", "bias")
    for m, n, k, extras, vectors in ((1, 64, 8, every, affine), (5, 64, 40, (), ()),
                                     (130, 128, 136, ("bias",), affine),
                                     (33, 384, 264, ("residual",), ("weight",))):  # fmt: skip
        shapes = {"bias": (n,), "residual": (m, n)}
        operands = [In((m, k)), In((n, k)), *(In(shapes[e]) for e in extras)]
        operands += [In((n,))] * len(vectors)
        attrs = {"linear": LinearAttrs(extras, ""), "norm": NormAttrs("layer", 1e-5, vectors)}
        whole = {**attrs, "variant": "whole_rows"}  # whose sums are not rounded
        cases.append(Case(tuple(operands), whole))
        cases.append(Case(tuple(operands), {**attrs, "variant": "apart"}, dtypes=("f32", "f16")))
        cases.append(Case((In((m, k), "large"), *operands[1:]), whole))
    rms = {"linear": LinearAttrs(("bias",), "silu"), "norm": NormAttrs("rms", 1e-5, ("weight",))}
    cases.append(Case((In((3, 5, 8)), In((7, 8)), In((7,)), In((7,))), rms))
    for x in LAYOUTS:
        operands = [In((3, 5, 19), layout=x), In((7, 19)), In((7,)), In((7,))]
        cases.append(Case(tuple(operands), rms, dtypes=("f32", "f16")))
    return Row(FLOATS, tuple(cases), sums=True)


def normed_linear() -> Row:
    """Norms, gate, what follows; depths of one, odd, past a block; the dtype of the result."""
    plain = {"extras": ("norm",), "gate": "", "eps": 1e-5, "alpha": 1.0, "dtype": ""}
    cases = []
    for m, k, n in (*GEMV, (2, 67, 33), (4, 256, 9), (16, 264, 8)):
        operands = (In((m, k)), In((n, k)))
        gated = (In((m, k), "positive"), In((2 * n, k), "positive"))  # no two sums near 0
        norm = In((k,), "positive", "f32")
        cases.append(Case((*operands, norm), plain))
        cases.append(Case((*gated, norm), {**plain, "gate": "silu", "variant": "joined"}))
        cases.append(Case((*operands, norm, In((m, n))),
                         {**plain, "extras": ("norm", "residual"), "alpha": 0.5}))  # fmt: skip
        layer = {**plain, "kind": "layer", "extras": ("norm",)}
        cases.append(Case((*operands, norm), layer))
        every = {**layer, "extras": ("norm", "shift", "bias", "residual"), "activation": "gelu"}
        after = (norm, In((k,), "normal", "f32"), In((n,), "normal", "f32"), In((m, n)))
        cases.append(Case((*operands, *after), every))
        cases.append(Case((In((m, k), "large"), In((n, k)), *after), every))
    gate = {**plain, "extras": (), "gate": "gelu_tanh", "dtype": "f32"}
    for x in LAYOUTS[1:]:
        cases.append(Case((In((2, 36), layout=x), In((10, 36))), gate))
        cases.append(Case((In((2, 36)), In((10, 36), layout=x)), gate))
    cases.append(Case((In((1, 40), "large"), In((9, 40)), In((40,))), plain))
    many = {**plain, "extras": (), "gate": "silu", "alpha": 0.5}
    for m, n, k in ((40, 16, 72), (70, 21, 136)):
        gated = (In((m, k), "positive"), In((2 * n, k), "positive"))
        cases += [Case(gated, {**many, "variant": v}) for v in ("mma", "wgmma")]
    for m, n, k in ((2, 30, 136), (11, 21, 264)):
        gated = (In((m, k), "positive"), In((2 * n, k), "positive"))
        cases.append(Case(gated, {**many, "variant": "streamed_rows"}))
    normed = {**many, "extras": ("norm",), "variant": "streamed_rows", "eps": 1e-3}
    for m, n, k, opened in ((2, 30, 136, ""), (11, 34, 264, "silu"), (16, 21, 648, "")):
        several = In((m, k), "large" if m == 2 else "normal")
        normed_rows = (several, In(((2 if opened else 1) * n, k)), In((k,), "positive", "f32"))
        cases.append(Case(normed_rows, {**normed, "gate": opened}, dtypes=("bf16",)))
    layer = {**normed, "kind": "layer", "extras": ("norm", "shift")}
    for m, n, k, opened in ((5, 30, 136, ""), (7, 34, 264, "silu"), (15, 21, 648, "")):
        several = In((m, k), "large" if m == 15 else "normal")
        vectors = (In((k,), "positive", "f32"), In((k,), "normal", "f32"))
        layer_rows = (several, In(((2 if opened else 1) * n, k)), *vectors)
        cases.append(Case(layer_rows, {**layer, "gate": opened}))
    behind = (
        In((136,), "positive", "f32"),
        In((136,), "normal", "f32"),
        In((38,), "normal", "f32"),
    )
    whole = (In((5, 136)), In((38, 136)), *behind, In((5, 38)))
    every = {"extras": ("norm", "shift", "bias", "residual"), "activation": "gelu", "gate": ""}
    cases.append(Case(whole, {**layer, **every}))
    for m, n, k in ((18, 30, 136), (61, 21, 520)):
        gated = (In((m, k), "positive"), In((2 * n, k), "positive"))
        cases.append(Case(gated, {**many, "variant": "streamed_many"}))
    one = {**many, "extras": ("norm",), "variant": "streamed"}
    for n, k in ((9, 128), (34, 264)):
        gated, norm = (In((1, k), "positive"), In((2 * n, k), "positive")), In((k,), "positive")
        cases += [Case((*gated, norm), one), Case((*gated, norm), {**one, "gate": ""})]
    for name in planes.BLOCKS:
        if (kind := FORMATS[name]).cores is not None:
            digits = {**one, "variant": "streamed_digits", "format": name, "gate": ""}
            k = max(256, 2 * kind.block)  # whole words of factors
            if any(plane.name == "exponents" for plane in kind.planes):  # of a byte for each block
                k = 16 * kind.block  # shorter rows are not padded to 16 bytes
            for n, opened in ((150, ""), (34, "relu")):
                rows = 2 * n if opened else n
                weight = planes.planes(name, rows, k // kind.block, "f16")
                joined = (In((1, k), "positive"), *weight, In((k,), "positive", "f32"))
                cases.append(Case(joined, {**digits, "gate": opened}, ("f16", "bf16")))
    return Row(FLOATS, tuple(cases), sums=True)


def matmul() -> Row:
    """Every variant; transposed operands; batches that broadcast; no depth."""
    cases = [
        Case(
            (In((m, k)), In((k, n))),
            {"variant": v},
            small=m < 100 or v != "small",
            sweep=(m, k, n) not in FEW,
        )
        for m, k, n in MATRICES
        for v in VARIANTS
    ]
    for variant, sizes in (("gemv", GEMV), ("skinny", SKINNY), ("skinny_mma", ON_CORES),
                           ("columns", GEMV + SKINNY)):  # fmt: skip
        lies = "plain" if variant == "columns" else "transposed"
        for m, k, n in sizes:
            if k > 1 and n > 1:  # else B is contiguous both ways
                operands = (In((m, k)), In((k, n), layout=lies))
                # The programs of the first two are those of `linear`, which has every size.
                swept = variant in ("gemv", "skinny") and (m, k, n) not in (GEMV[3], SKINNY[0])
                cases.append(Case(operands, {"variant": variant}, sweep=swept))
    thin = {"alpha": 0.5}
    for lies in ("plain", "transposed"):  # the depth split among groups; batches; values of 800
        cases.append(Case((In((3, 600)), In((600, 33), layout=lies)), thin))
        cases.append(Case((In((2, 3, 9, 600)), In((3, 600, 5), layout=lies)), thin))
        cases.append(Case((In((2, 1, 40)), In((40, 34), layout=lies)), thin))
        cases.append(Case((In((5, 33), "large"), In((33, 20), layout=lies)), thin))
        cases.append(Case((In((2, 0)), In((0, 5), layout=lies)), thin))
        cases.append(Case((In((1, 5)), In((5, 8193), layout=lies)), small=False))
        for x in LAYOUTS[1:]:
            cases.append(Case((In((6, 36), layout=x), In((36, 10), layout=lies)), thin))
    for x in ("offset", "strided", "pads", "rows"):
        cases.append(Case((In((6, 36)), In((36, 10), layout=x)), thin))
    cases.append(Case((In((1500, 33)), In((33, 130))), small=False))
    for la, lb in (("transposed", "plain"), ("plain", "transposed"), ("transposed", "transposed"),
                   ("offset", "strided"), ("pads", "pads"), ("rows", "offset")):  # fmt: skip
        cases.append(Case((In((33, 20), layout=la), In((20, 18), layout=lb)), {"alpha": 0.5}))
    for a, b in (((2, 3, 5, 7), (2, 3, 7, 4)), ((3, 5, 7), (7, 4)), ((5, 7), (3, 7, 4)),
                 ((1, 5, 8), (3, 8, 4)), ((2, 1, 3, 4), (3, 4, 2)), ((2, 1, 1, 9), (1, 3, 9, 1)),
                 ((3, 0), (0, 4)), ((0, 3), (3, 2)), ((2, 3, 0), (2, 0, 5))):  # fmt: skip
        cases.append(Case((In(a), In(b))))
    cases += [Case((In((5, 19), values), In((19, 9)))) for values in ("large", "hidden")]
    cases.append(Case((In((300, 64)), In((64, 200))), small=False))
    factor = In((DEPTH, 2), (-3, 4))  # whole numbers, whose sums are exact
    for rows, lies in ((33, "transposed"), (1, "plain")):
        operands = (In((rows, DEPTH), (-3, 4)), replace(factor, layout=lies))
        cases.append(Case(operands, {}, ("f32",), small=False))
    for kind, m in product(("f32", "f16", "bf16"), (1, 3, 33)):  # rounded to another dtype
        cases.append(Case((In((m, 40)), In((40, 18))), {"dtype": kind}))
    cases += tensor_cores()
    return Row(FLOATS, tuple(cases), sums=True)


def linear() -> Row:
    """Every variant and activation; bias and residual; weights of another dtype."""
    plain = {"extras": (), "activation": "", "alpha": 1.0}
    cases = [
        Case(
            (In((m, k)), In((n, k))),
            {**plain, "variant": v},
            small=m < 100 or v != "small",
            sweep=(m, k, n) not in FEW[-1:],
        )
        for m, k, n in MATRICES[1:]
        for v in VARIANTS
    ]
    for variant, sizes in (("gemv", GEMV), ("skinny", SKINNY)):
        for m, k, n in sizes:
            cases.append(Case((In((m, k)), In((n, k))), {**plain, "variant": variant}))
    cases.append(Case((In((1500, 33)), In((65, 33))), plain, small=False))
    cases.append(Case((In((1, 5)), In((151_936, 5))), plain, ("f32", "f16"), small=False))
    cases.append(Case((In((5, 33), "large"), In((20, 33))), plain))
    cases.append(Case((In((5, 72), "large"), In((20, 72))), {**plain, "variant": "skinny_mma"}))
    cases += quantised()
    cases += planes.linear()
    cases += fused_on_tensor_cores()
    both = {"extras": ("bias", "residual"), "alpha": 1.0}
    for activation in ("", "relu", "gelu", "gelu_tanh", "gelu_quick", "silu", "sigmoid", "tanh"):
        operands = (In((5, 24)), In((10, 24)), In((10,)), In((5, 10)))
        cases.append(Case(operands, {**both, "activation": activation}))
        far = (replace(operands[0], values="large"), *operands[1:])
        cases.append(Case(far, {**both, "activation": activation}))
    some = {"extras": ("bias",), "activation": "", "alpha": 0.25}
    for shape, n in (((24,), 7), ((2, 3, 24), 5), ((0, 24), 3), ((3, 0), 5), ((3, 24), 0),
                     ((0, 0), 0)):  # fmt: skip
        cases.append(Case((In(shape), In((n, shape[-1])), In((n,))), some))
    for m in (5, 17):
        for kind in FLOATS:
            weights = (In((10, 24), dtype=kind), In((10,), dtype="f32"))
            cases.append(Case((In((m, 24)), *weights), some))
    for kind, m in product(("f32", "f16"), (1, 18)):  # rounded to another dtype
        operands = (In((m, 24)), In((9, 24)), In((9,)), In((m, 9)))
        cases.append(Case(operands, {**both, "activation": "gelu", "dtype": kind}))
    residual = {"extras": ("residual",), "activation": "", "alpha": 1.0}
    for x in LAYOUTS[1:]:
        cases.append(Case((In((6, 9), layout=x), In((5, 9)), In((6, 5), layout=x)), residual))
        cases.append(Case((In((6, 9)), In((5, 9), layout=x), In((5,), layout="offset")), some))
        cases.append(Case((In((20, 36), layout=x), In((5, 36)), In((20, 5), layout=x)), residual))
        cases.append(Case((In((20, 36)), In((5, 36), layout=x), In((5,), layout="offset")), some))
    return Row(FLOATS, tuple(cases), sums=True)


def quantised() -> list[Case]:
    """`linear` with i8 weights and a factor for each output, in every variant and layout."""
    scale = In((33,), "positive", "f32")
    plain = {"extras": ("scale",), "activation": "", "alpha": 1.0}
    cases = []
    for m, k, v in ((1, 67, "gemv"), (1, 1025, "gemv"), (3, 40, "skinny"), (16, 129, "skinny"),
                    (1, 5, "small"), (40, 67, "small"), (70, 35, "medium"), (130, 33, "large"),
                    (40, 64, None), (2, 0, None),
                    (1, 67, "skinny_mma"), (13, 130, "skinny_mma")):  # fmt: skip
        attrs = plain if v is None else {**plain, "variant": v}
        cases.append(Case((In((m, k)), In((33, k), dtype="i8"), scale), attrs, small=m < 100))
    whole = {"extras": ("scale", "bias", "residual"), "activation": "silu", "alpha": 0.01}
    for m in (1, 5, 18):
        more = (scale, In((33,)), In((m, 33)))
        cases.append(Case((In((m, 40)), In((33, 40), (-9, 9), "i8"), *more), whole))
        for x in LAYOUTS[1:]:
            weight = In((33, 40), dtype="i8", layout=x)
            cases.append(Case((In((m, 40)), weight, scale), plain))
    cases.append(Case((In((5, 24)), In((33, 24)), scale), plain))  # a float weight may have them
    return cases


def conv1d() -> Row:
    """Every variant; strides, padding, one tap and many; what lies for the product already."""
    cases = []
    for (b, c, n), (out, taps), stride, padding in (
        *(((1, 1, 1), (1, 1), 1, 0), ((2, 3, 9), (5, 3), 1, 1), ((2, 16, 12), (8, 3), 2, 1)),
        *(((1, 1, 17), (3, 7), 1, 0), ((2, 8, 10), (4, 3), 2, 0), ((1, 5, 4), (2, 1), 1, 0)),
        *(((1, 3, 0), (2, 3), 1, 2), ((2, 0, 5), (3, 3), 1, 0), ((0, 2, 5), (3, 3), 1, 0)),
        *(((2, 4, 5), (1, 2), 3, 4), ((1, 8, 70), (33, 3), 1, 1), ((3, 5, 11), (0, 2), 1, 0)),
    ):
        attrs = {"stride": stride, "padding": padding, "activation": ""}
        cases.append(Case((In((b, c, n)), In((out, c, taps))), attrs))
        cases.append(Case((In((b, c, n)), In((out, c, taps)), In((out,))), attrs))
    three = (In((2, 8, 21)), In((6, 8, 3)), In((6,)))
    attrs = {"stride": 1, "padding": 1, "activation": ""}
    for variant, n in (*((v, 21) for v in VARIANTS), ("gemv", 1), ("skinny", 13),
                       ("skinny_mma", 13)):  # fmt: skip
        cases.append(Case((In((2, 8, n)), *three[1:]), {**attrs, "variant": variant}))
    for variant, n in (("streamed", 8), ("streamed_rows", 15), ("streamed_many", 40)):
        one = {**attrs, "padding": 0, "variant": variant}
        cases.append(Case((In((1, 16, n)), In((33, 16, 8)), In((33,))), one))
    cases += [Case(three, {**attrs, "activation": a}) for a in ("relu", "gelu", "silu", "tanh")]
    bare = {"stride": 2, "padding": 0, "activation": ""}
    for layout in LAYOUTS[1:]:
        cases.append(Case((replace(three[0], layout=layout), *three[1:]), attrs))
        cases.append(Case((replace(three[0], layout=layout), *three[1:]), bare))
        views = (replace(three[1], layout=layout), replace(three[2], layout="offset"))
        cases.append(Case((three[0], *views), attrs))
    cases.append(Case((three[0], In((6, 8, 3), dtype="bf16"), In((6,), dtype="f32")), attrs))
    cases.append(Case((In((2, 8, 21), "large"), *three[1:]), attrs))
    return Row(FLOATS, tuple(cases), sums=True)
