"""What attention is asked to do: its attributes, and what every kernel of it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from msgspec import Struct

from centella import lang
from centella.dtypes import DType, bf16, f16, u32
from centella.emit.program import Call, Constants, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.op.op import Form
from centella.op.variant import Variant
from centella.ops.attention.masks import Scoring
from centella.ops.layout import flat
from centella.specs import Spec

VARIANTS = ("tiled", "stream", "split", "mma", "wgmma", "split_mma", "cluster_mma", "ring")
T = TypeVar("T")
Scalars = dict[str, int | float]
BY_HEAD = "heads share lq lk qb qh ql kl vl yb yh yl blocks"
NONE: Mapping[str, Any] = {}
WIDEST = 1 << 29  # window: positions and it add up to less than 2^31


class AttentionAttrs(Struct, frozen=True):
    """The masks that come after v, the factor of scores, and a kernel that is forced.

    Attributes:
        window: a query sees the keys of less than so many positions away.
        softcap: c, of which a score is made c tanh(score / c) before a mask is added.
    """

    masks: tuple[str, ...]
    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    variant: str | None = None

    @property
    def scoring(self) -> Scoring:
        """What of it is part of a program."""
        return Scoring(self.causal, self.window is not None, self.softcap is not None)


class AttentionVariant(Variant[Form[AttentionAttrs], T], Generic[T], frozen=True, eq=False):
    """A kernel of attention.

    Attributes:
        needs: what a form must be for it, as the error of a forced one says it; `{dim}`,
            `{shared}` and `{threads}` are the form's head and what the device has.
    """

    needs: str = ""


def parameters(names: str) -> dict[str, Any]:
    """Launch parameters of a kernel, u32, by name."""
    return {name: lang.parameter(name, u32) for name in names.split()}


def rows_of_16_bits(form: Form[AttentionAttrs], stored: tuple[DType, ...] = (f16, bf16)) -> bool:
    """Whether q, k and v are f16 or bf16 in rows on 16 bytes, with something to read.

    Args:
        stored: what keys and values may be.
    """
    kinds = ((f16, bf16), stored, stored)
    pairs = zip(form.inputs, kinds, strict=False)
    return all(s.dtype in kind and s.aligned and s.size > 0 for s, kind in pairs)


def operands(form: Form[AttentionAttrs], *names: str) -> dict[str, Ref]:
    """The memory of the inputs by name: of all, or of these where they are there."""
    every = zip(("q", "k", "v", *form.attrs.masks), form.inputs, strict=True)
    return {
        n: Ref(i, flat(s) if len(s.shape) > 1 else s)
        for i, (n, s) in enumerate(every) if not names or n in names
    }  # fmt: skip


def extents(form: Form[AttentionAttrs]) -> tuple[int, int]:
    """Heads of keys, and keys of a sequence: as many as its row of a table has room for."""
    k, masks = form.inputs[1], form.attrs.masks
    if "blocks" not in masks:
        return k.shape[1], k.shape[2]
    return k.shape[0], form.inputs[3 + masks.index("blocks")].shape[1] * k.shape[2]


def queries_of(form: Form[AttentionAttrs]) -> int:
    """Queries of a sequence; of texts end to end, of a text of the mean length."""
    lq, texts = form.inputs[0].shape[2], texts_of(form)
    return lq if texts is None else -(-lq // max(texts, 1))


def texts_of(form: Form[AttentionAttrs]) -> int | None:
    """How many texts lie end to end; None for sequences of a batch."""
    masks = form.attrs.masks
    if "offsets" not in masks:
        return None
    return form.inputs[3 + masks.index("offsets")].shape[0] - 1


def keys_seen(form: Form[AttentionAttrs], queries: int) -> int:
    """How many keys so many queries next to each other see at most."""
    attrs, (_, lk) = form.attrs, extents(form)
    if attrs.window is None:
        return lk
    before = "starts" in attrs.masks or attrs.causal
    return min(lk, attrs.window + queries - 1 + (0 if before else attrs.window - 1))


def scalars_of(form: Form[AttentionAttrs]) -> Scalars:
    """Scale, extents, and strides: of q, k, v and y along batch, head and position (b, h, l)."""
    (q, k, _, *more), y = form.inputs, form.outputs[0]
    (batch, heads, lq, dim), (kv_heads, lk) = q.shape, extents(form)
    part, attrs = form.part("q", lq), form.attrs
    scalars: Scalars = {
        "scale": attrs.scale / (attrs.softcap or 1.0), "batch": batch, "heads": heads,
        "kv_heads": kv_heads, "share": heads // kv_heads, "lq": lq, "lk": lk, "dim": dim,
        "start": part.first + (0 if "starts" in attrs.masks else lk - part.whole),
        "window": min(attrs.window or 0, WIDEST), "softcap": attrs.softcap or 0.0,
    }  # fmt: skip
    pools = "blocks" in attrs.masks
    for name, spec in zip("qkv", form.inputs, strict=False):
        scalars.update(steps_of(name, spec, "htl" if pools and name != "q" else "bhl"))
    for name, spec in zip(attrs.masks, more, strict=True):
        if name == "blocks":
            scalars |= {"tb": spec.strides[0], "pool": k.shape[1]}
        if name == "scales":
            scalars |= steps_of("s", spec, ("ht" if pools else "bh") + "le")
        if name == "offsets":
            texts = spec.shape[0] - 1
            scalars |= {"texts": texts, "rounds": (texts + 1).bit_length()}
        if name == "key_mask":
            scalars["mb"] = spec.strides[0]
        if name == "bias":
            row = spec.strides[0] if spec.shape[0] > 1 else 0
            scalars |= {"distances": spec.shape[1], "bias_row": row}
        if name == "mask":
            repeated = (0 if n == 1 else s for n, s in zip(spec.shape, spec.strides, strict=True))
            scalars.update(zip(("ab", "ah", "al", "ak"), repeated, strict=True))
    return scalars | steps_of("y", y, "blh")


def steps_of(name: str, spec: Spec, axes: str = "bhl") -> dict[str, int]:
    """The strides of as many dimensions as there are axes, as kernels call them."""
    return {f"{name}{axis}": s for axis, s in zip(axes, spec.strides, strict=False)}


def launch(
    kernel: Kernel, form: Form[AttentionAttrs], groups: int, constants: Constants,
    reads: Mapping[str, Ref], writes: Mapping[str, Ref], *, changes: Mapping[str, Ref] = NONE,
    scalars: Mapping[str, int | float] = NONE, threads: int | None = None,
) -> Call:  # fmt: skip
    """One launch, its operands by name.

    Args:
        changes: operands of which some is written and the rest stays.
        scalars: beside those of the form; threads: of a group, else the kernel's.
    """
    by_mode = (reads, writes, changes)
    refs = tuple(ref for named in by_mode for ref in named.values())
    params = signature(*(dict.fromkeys(named, 1) for named in by_mode))
    named = tuple({**scalars_of(form), **scalars}.items())
    return Call(kernel, refs, named, constants, groups, workgroup=threads, signature=params)


def launch_by_head(
    kernel: Kernel, form: Form[AttentionAttrs], queries: int, constants: Constants,
    threads: int | None = None, *, pieces: int = 1, instead: Mapping[str, Ref] = NONE,
    scalars: Mapping[str, int | float] = NONE,
) -> Call:  # fmt: skip
    """The launch of a kernel whose groups have `queries` of a head each, or a piece of them.

    Args:
        instead: what is read beside the inputs, or for one of the same name.
    """
    batch, lq, heads, dim = form.outputs[0].shape
    texts = texts_of(form)
    blocks = -(-lq // queries) if texts is None or not lq else lq // queries + texts + 1
    return launch(
        kernel, form, batch * heads * blocks * pieces,
        (("scoring", form.attrs.scoring), ("dim", dim), *constants),
        {**operands(form), **instead}, {"y": Ref(len(form.inputs), form.outputs[0])},
        scalars={"blocks": blocks, **scalars}, threads=threads,
    )  # fmt: skip
