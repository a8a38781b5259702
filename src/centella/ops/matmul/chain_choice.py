"""Which launches `linear_chain` is: one whose groups meet, or those of each link's product."""

from __future__ import annotations

import math
from typing import Any

from centella.dtypes import bf16, f16, f32
from centella.emit.program import Call, Ref
from centella.op.form import Form
from centella.op.op import Lowered
from centella.op.variant import Variant, choose
from centella.ops.elementwise import plain_call
from centella.ops.kernel_params import signature
from centella.ops.layout import flat
from centella.ops.matmul.chain import GIVEN, ChainAttrs, parted, results, shapes
from centella.ops.matmul.chain_kernel import CHUNK, WARP, WARPS, ChainTile, LinkTile, kernel
from centella.ops.matmul.normed import NORMED, NormedAttrs
from centella.ops.matmul.op import LINEAR
from centella.ops.matmul.problem import LinearAttrs, aligned
from centella.specs import Caps, Spec, make_spec

MOST_CHUNKS = 5  # of a row, a thread: what it keeps of x takes 8 registers each
LEAST_RING = 3  # rows of a ring
BESIDE = 1 << 10  # bytes of shared memory for squares, and to spare


def tile_of(form: Form[ChainAttrs], caps: Caps) -> ChainTile | None:
    """How groups work; None where rows are not whole chunks of 16-bit weights, or too long."""
    x, attrs = form.inputs[0], form.attrs
    every = shapes(form.inputs, attrs)
    own = list(parted(form.inputs, attrs))
    weights = [operands[0] for _, _, operands in own]
    kinds = {w.dtype for w in weights}
    on_cores = caps.processors and caps.shuffles and caps.tensor_cores
    if not on_cores or math.prod(x.shape[:-1]) != 1:
        return None
    whole = all(aligned(w, w.strides[0], 0) and w.shape[1] % CHUNK == 0 for w in weights)
    whole &= all(aligned(operands[1], 0, 0) for link, _, operands in own if link.norm)
    kept = results(attrs)
    words = [every[i][1].per_word if i in kept else 1 for i in range(len(every))]
    even = all(shape[-1] % n == 0 for (shape, _), n in zip(every, words, strict=True))
    operands = len(form.inputs) + len(kept) + len(own) - 1
    if len(kinds) != 1 or not kinds <= {f16, bf16} or not (whole and even and x.aligned):
        return None
    if operands > caps.max_storage_buffers:
        return None
    warps = min(WARPS, caps.max_workgroup // WARP)
    links, most = [], 1
    for (link, _, (weight, *_)), (shape, _), per in zip(own, every, words, strict=True):
        chunks = weight.shape[1] // CHUNK
        split = next((s for s in _powers(warps) if -(-chunks // (s * WARP)) <= MOST_CHUNKS), 0)
        if not split:
            return None
        each = -(-chunks // (split * WARP))
        links.append(LinkTile(split, each, chunks == each * split * WARP))
        count = -(-shape[-1] // per // caps.processors) * per
        most = max(most, count * (2 if link.gate else 1) * split)
    parts = -(-most // 4) * 4
    row = max(link.chunks for link in links) * warps * WARP * 16
    ring = min((caps.max_shared - 4 * parts - BESIDE) // row, 16)
    if ring < LEAST_RING:
        return None
    return ChainTile(caps.processors, warps, ring, tuple(links), parts)


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def _preferred(form: Form[ChainAttrs], caps: Caps) -> bool:
    return caps.fast_tensor_cores


def _one_launch(form: Form[ChainAttrs], tile: ChainTile, caps: Caps) -> Lowered:
    """All links; what the next ones take lies in temporaries of f32."""
    attrs, count = form.attrs, len(form.inputs)
    every, kept = shapes(form.inputs, attrs), results(attrs)
    reads: dict[str, Ref] = {"x": Ref(0, flat(form.inputs[0]))}
    if attrs.has_residual:
        reads["residual"] = Ref(1, flat(form.inputs[1]))
    scalars: list[tuple[str, int | float]] = []
    writes: dict[str, Ref] = {}
    changes: dict[str, Ref] = {}
    temporaries: list[Spec] = []
    for i, (link, first, (weight, *more)) in enumerate(parted(form.inputs, attrs)):
        reads[f"w{i}"] = Ref(first, flat(weight))
        names = [name for name in ("norm", "bias") if getattr(link, name)]
        for j, (name, spec) in enumerate(zip(names, more, strict=True)):
            reads[f"{name}{i}"] = Ref(first + 1 + j, flat(spec))
        shape = every[i][0]
        scalars += [(f"k{i}", weight.shape[1]), (f"n{i}", shape[-1]),
                    (f"ldw{i}", weight.strides[0])]  # fmt: skip
        if i in kept:
            writes[f"out{i}"] = Ref(count + kept.index(i), flat(form.outputs[kept.index(i)]))
        if i < len(attrs.links) - 1:
            temporaries.append(make_spec((shape[-1],), f32, 16))
            changes[f"y{i}"] = Ref(count + len(kept) + i, temporaries[-1])
    params = signature(*(dict.fromkeys(by, 1) for by in (reads, writes, changes)))
    call = Call(
        kernel, (*reads.values(), *writes.values(), *changes.values()), tuple(scalars),
        (("links", attrs.links), ("tile", tile)), tile.groups, workgroup=tile.threads,
        signature=params,
    )  # fmt: skip
    return Lowered((call,), tuple(temporaries))


def _each(form: Form[ChainAttrs], tile: bool, caps: Caps) -> Lowered:
    """The launches of each link's product."""
    attrs, count = form.attrs, len(form.inputs)
    every, kept = shapes(form.inputs, attrs), results(attrs)
    last = len(every) - 1
    own_first = count + len(kept)
    launches = Lowered((), tuple(make_spec(shape, f32, 16) for shape, _ in every[:-1]))
    where = [(own_first + i, spec) for i, spec in enumerate(launches.temporaries)]
    where.append((own_first - 1, form.outputs[-1]))
    source = (0, form.inputs[0])
    for i, (link, first, own) in enumerate(parted(form.inputs, attrs)):
        extras = [name for name in ("norm", "bias") if getattr(link, name)]
        operands = [source, *((first + j, spec) for j, spec in enumerate(own))]
        if link.residual is not None:
            extras.append("residual")
            operands.append((1, form.inputs[1]) if link.residual == GIVEN else where[link.residual])
        specs = tuple(spec for _, spec in operands)
        named, out = tuple(extras), where[i][1]
        product: Form[Any]
        if link.norm or link.gate:
            normed = NormedAttrs(named, link.gate, link.eps, alpha=link.alpha, dtype=out.dtype.name)
            product = Form(NORMED, specs, (out,), normed)
        else:
            linear = LinearAttrs(named, "", link.alpha, out.dtype.name)
            product = Form(LINEAR, specs, (out,), linear)
        numbers = (*(n for n, _ in operands), where[i][0])
        launches += product.lower(caps).within(numbers, own_first + len(launches.temporaries))
        source = where[i]
        if i in kept and i < last:
            result = form.outputs[kept.index(i)]
            rounded = plain_call("copy", (source[1],), result, caps)
            launches += Lowered((rounded,)).within((source[0], count + kept.index(i)), 0)
    return launches


RESIDENT: Variant[Form[ChainAttrs], ChainTile] = Variant(
    "resident", tile_of, _one_launch, _preferred
)
APART: Variant[Form[ChainAttrs], bool] = Variant("apart", lambda form, caps: True, _each)


def lower(form: Form[ChainAttrs], caps: Caps) -> Lowered:
    """The launches of the variant that is forced or chosen."""
    what = f"linear_chain of {len(form.attrs.links)} links"
    return choose((RESIDENT, APART), form, caps, form.attrs.variant, what).lower(form, caps)
