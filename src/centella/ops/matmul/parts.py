"""A product whose depth is split: partial sums as batches of a kernel, which a launch then adds."""

from __future__ import annotations

from msgspec.structs import replace

from centella import lang
from centella.dtypes import f32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.op.op import Lowered
from centella.ops.layout import flat
from centella.ops.matmul.epilogue import Epilogue
from centella.ops.matmul.product import Constants, Product, Scalars
from centella.specs import Spec


def _add_parts(*, activation: str, parts: Argument, y: Argument, **extra: Argument) -> None:
    """y = f(alpha sum_s parts[s]), as any product ends: a word a thread, the parts in order."""
    p = {n: lang.parameter(n, u32) for n in (
        "m", "n", "words", "splits", "ldp", "sp", "ldy", "sy", "items")}  # fmt: skip
    item, per = lang.global_id(), y.dtype.per_word
    with lang.if_(item < p["items"]):
        row, word = item // p["words"], item % p["words"]
        batch = row // p["m"]
        column, row = word * per, row - batch * p["m"]
        sums = lang.vars(f32, per, init=0.0)
        for split in lang.range(p["splits"]):
            start = (batch * p["splits"] + split) * p["sp"] + row * p["ldp"]
            for j, total in enumerate(sums):
                at = lang.minimum(column + j, p["n"] - 1) if j else column
                total.set(total + parts[start + at])
        finish = Epilogue(activation, extra, column, per, p["n"])
        y.store(batch * p["sy"] + row * p["ldy"] + column, finish(list(sums), row))


add_parts: Kernel = Kernel(_add_parts, workgroup=256, name="add_parts", rewritable=True)


def added(product: Product, first: Call, parts: Spec, splits: int) -> Lowered:
    """A launch that writes its parts to a temporary, and the one that ends the product.

    Args:
        first: of the parts, with a and b as its first operands.
    """
    problem, y = product.problem, product.specs[-1]
    names, temporary = product.names, len(product.specs)
    first = replace(first, tensors=(*first.tensors[:2], Ref(temporary, parts)))
    words = -(-problem.n // y.dtype.per_word)
    items = words * problem.m * problem.batch
    scalars: Scalars = (
        ("m", problem.m), ("n", problem.n), ("words", words), ("splits", splits),
        ("ldp", parts.strides[1]), ("sp", parts.strides[0]), ("ldy", problem.ldy),
        ("sy", problem.sy), ("items", items), ("alpha", product.alpha),
        ("ldr", product.residual_pitch),
    )  # fmt: skip
    extras = (Ref(i, flat(product.specs[i])) for i in range(2, 2 + len(names)))
    refs = (Ref(temporary, flat(parts)), *extras, Ref(2 + len(names), y))
    form = signature(dict.fromkeys(("parts", *names), 1), {"y": 1})
    constants: Constants = (("activation", product.activation),)
    last = Call(
        add_parts, refs, scalars, constants, -(-items // add_parts.workgroup), signature=form
    )
    return Lowered((first, last), (parts,))
