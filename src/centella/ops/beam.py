"""The ops of a beam search: which candidates go on, and where their keys and values are.

beam_select  The best of each prompt's candidates, as many as it has beams; of equal ones the first,
             NaN before every number. A candidate is a score and a code, beam * vocab + token. It
             has ended if ends[token] is not 0, and then counts `OUT` less. Their tokens, parents
             (rows of the beams of all prompts) and scores replace those that were.
beam_blocks  Each beam goes on from a parent of its prompt's, whose number is parents[row] modulo
             beam: its row of a table of blocks becomes the parent's. The block that is written next
             is of one beam alone: a beam with the same parent as one before it gets that of a
             parent without beams, and a note of what to copy there.

A table is i32 `[prompts * beam, 1 + width]`, as `cache_write` takes it; beam_blocks adds 1 to the
positions, of which a prompt's are one. The blocks before that of the next position are shared with
the parent; those behind it stay a row's own. A note is `cache_copy`'s: from, to, keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, f32, i32, u32
from centella.emit.program import Call, HostProgram, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.op import Form, Lowered, NoAttrs, Op, Out, unit_rows
from centella.ops import topk
from centella.ops.argmax import order
from centella.specs import Caps, Spec

OUT = -1.0e9  # added to the score of what may not be taken
THREADS = topk.MOST  # of a group, which has a prompt: a candidate each
NOTE = 3  # numbers of a copy: from, to, keys


class BlocksAttrs(Struct, frozen=True):
    """Beams of a prompt, keys of a block."""

    beam: int
    size: int


def _flag(condition: Operand) -> Expr:
    """1 or 0."""
    return lang.select(condition, lang.const(1, u32), lang.const(0, u32))


def _select(
    *, best: Argument, which: Argument, ends: Argument, tokens: Argument, parents: Argument,
    running: Argument,
) -> None:  # fmt: skip
    """A thread has a candidate, and writes it where it goes on."""
    prompt, beam = lang.group_id(), lang.parameter("beam", u32)
    token, parent, score, place = placed(best, which, prompt, lambda token: ends[token] != 0)
    row = prompt * beam + place
    with lang.if_((lang.local_id() < lang.parameter("count", u32)) & (place < beam)):
        tokens[row] = lang.bitcast(token, i32)
        parents[row] = lang.bitcast(prompt * beam + parent, i32)
        running[row] = score


def placed(
    best: Argument, which: Argument, prompt: Operand, ended: Callable[[Expr], Expr]
) -> tuple[Expr, Expr, Expr, Expr]:
    """A thread has a candidate of a prompt, and counts those that go before it.

    Args:
        ended: whether a token ends a text.

    Returns:
        Its token, its parent among the prompt's beams, its score, and their number.
    """
    count, vocab = (lang.parameter(n, u32) for n in ("count", "vocab"))
    me = lang.local_id()
    code = lang.bitcast(which[prompt, lang.minimum(me, count - 1)], u32)
    token = code % vocab
    score = best[prompt, lang.minimum(me, count - 1)]
    score = lang.select(ended(token), score + OUT, score)
    key, keys = order(score), lang.shared(u32, lang.workgroup_size())
    keys[me] = key
    lang.barrier()
    before = lang.var(0, u32)
    for other in lang.range(lang.const(0, u32), count):
        before += _flag((keys[other] > key) | ((keys[other] == key) & (other < me)))
    return token, code // vocab, score, before.get()


STATES = {"tokens": 1, "parents": 1, "running": 1}
select_kernel: Kernel = Kernel(
    _select, workgroup=THREADS, name="beam_select",
    signature=signature({"best": 2, "which": 2, "ends": 1}, {}, STATES),
)  # fmt: skip


def select_rule(specs: tuple[Spec, ...], attrs: NoAttrs) -> tuple[Out, ...]:
    """States [p * beam] of i32, i32, f32; scores f32 and codes i32 [p, k], ends i32 [vocab]."""
    states, (best, which, ends) = specs[:3], specs[3:]
    shapes = [list(s.shape) for s in specs]
    if len(best.shape) != 2 or best.shape != which.shape or len(ends.shape) != 1:
        raise ShapeError(
            f"beam_select: expected scores and codes [prompts, candidates] and ends [vocab], got "
            f"{', '.join(map(str, shapes[3:]))}"
        )
    prompts, count = best.shape
    beam = states[0].size // max(prompts, 1)
    if any(s.shape != (prompts * beam,) for s in states) or not 0 < beam <= count <= THREADS:
        raise ShapeError(
            f"beam_select: expected tokens, parents and scores [{prompts} * beam] of up to {count} "
            f"beams, and up to {THREADS} candidates, got {', '.join(map(str, shapes[:3]))}"
        )
    if [s.dtype for s in specs] != [i32, i32, f32, f32, i32, i32]:
        names = [s.dtype.name for s in specs]
        raise DTypeError(f"beam_select: expected i32, i32, f32, f32, i32 and i32, got {names}")
    return tuple((s.shape, s.dtype) for s in states)


def select_reference(
    tokens: Any, parents: Any, running: Any, best: Array, which: Array, ends: Array
) -> Any:
    """The NumPy formula: changes `tokens`, `parents` and `running`."""
    beam = len(tokens) // len(best)
    codes: Array = which.astype(np.int64)
    of_codes, first = codes % len(ends), beam * np.arange(len(best))[:, None]
    scores, places = chosen(best, ends[of_codes] != 0, beam)
    tokens[:] = np.take_along_axis(of_codes, places, 1).ravel()
    parents[:] = np.take_along_axis(first + codes // len(ends), places, 1).ravel()
    running[:] = scores.ravel()
    return tokens, parents, running


def chosen(best: Array, ended: Array, beam: int) -> tuple[Array, Array]:
    """Scores and places of the candidates that go on, [.., beam].

    Args:
        best, ended: of candidates [.., k]: scores, the best first, and whether they have ended.
    """
    scores = best.astype(np.float32)  # in float64 those that have ended would not be equal
    return topk.reference(np.where(ended, scores + np.float32(OUT), scores), beam)


def select_lower(form: Form[NoAttrs], caps: Caps) -> Lowered:
    """One launch, a group a prompt."""
    tokens, best, ends = (form.inputs[i] for i in (0, 3, 5))
    prompts, count = best.shape
    scalars = (("count", count), ("beam", tokens.size // prompts), ("vocab", ends.size))
    refs = tuple(Ref(i, form.inputs[i]) for i in (3, 4, 5, 0, 1, 2))
    return Lowered((Call(select_kernel, refs, scalars, (), prompts),))


def _blocks(*, parents: Argument, copies: Argument, table: Argument) -> None:
    """A group has the beams of a prompt: a thread a beam, then a thread an entry of some columns.

    Of a column all entries are read before one is written.
    """
    beam, size, columns = (lang.parameter(n, u32) for n in ("beam", "size", "columns"))
    first, me, zero = lang.group_id() * beam, lang.local_id(), lang.const(0, u32)
    position = lang.bitcast(table[first, 0], u32) + 1
    next_column, keys = position // size + 1, position % size
    own = first + lang.minimum(me, beam - 1)
    froms, again, unused, tails = (lang.shared(u32, THREADS) for _ in range(4))
    froms[me] = first + lang.bitcast(parents[own], u32) % beam
    lang.barrier()
    before, children = lang.var(0, u32), lang.var(0, u32)
    for other in lang.range(zero, beam):
        before += _flag((froms[other] == froms[me]) & (other < me))
        children += _flag(froms[other] == own)
    copied = _flag(before.get() > 0)
    again[me], unused[me] = copied, _flag(children.get() == 0)
    lang.barrier()
    number, place, donor = lang.var(0, u32), lang.var(0, u32), lang.var(froms[me])
    for other in lang.range(zero, me):
        number += again[other]
    for other in lang.range(zero, beam):
        chosen = (unused[other] > 0) & (place.get() == number.get()) & (copied > 0)
        donor.set(lang.select(chosen, first + other, donor.get()))
        place += unused[other]
    donor.set(lang.select(keys > 0, donor.get(), own))
    last = lang.minimum(next_column, columns - 1)
    tail = table[donor.get(), last]
    tails[me] = lang.bitcast(tail, u32)
    with lang.if_(me < beam):
        copies[own, 0] = table[froms[me], last]
        copies[own, 1] = tail
        copies[own, 2] = lang.bitcast(copied * keys, i32)
    lang.barrier()
    together = lang.workgroup_size() // beam  # columns
    row, across = me % beam, me // beam
    for start in lang.range(zero, columns, together):
        column = start + across
        here = (across < together) & (column < columns)
        source = lang.select(column < next_column, froms[row], first + row)
        entry = table[source, lang.minimum(column, columns - 1)]
        value = lang.select(column == next_column, tails[row], lang.bitcast(entry, u32))
        value = lang.select(column == 0, position, value)
        lang.barrier()
        with lang.if_(here):
            table[first + row, column] = lang.bitcast(value, i32)


blocks_kernel: Kernel = Kernel(
    _blocks, workgroup=THREADS, name="beam_blocks",
    signature=signature({"parents": 1}, {"copies": 2}, {"table": 2}),
)  # fmt: skip


def blocks_rule(specs: tuple[Spec, ...], attrs: BlocksAttrs) -> tuple[Out, ...]:
    """A table [rows, 1 + width] and parents [rows], i32; copies [rows, 3]."""
    table, parents = specs
    fits = len(table.shape) == 2 and table.shape[1] > 1 and parents.shape == table.shape[:1]
    if not fits or not 0 < attrs.beam <= THREADS or table.shape[0] % attrs.beam:
        raise ShapeError(
            f"beam_blocks: expected a table [prompts * {attrs.beam}, 1 + width] and parents of its "
            f"rows, up to {THREADS} of a prompt, got {list(table.shape)} and {list(parents.shape)}"
        )
    if (table.dtype, parents.dtype) != (i32, i32):
        names = [s.dtype.name for s in specs]
        raise DTypeError(f"beam_blocks: expected i32 and i32, got {names}")
    return (table.shape, i32), ((table.shape[0], NOTE), i32)


def blocks_reference(table: Any, parents: Array, beam: int, size: int) -> Any:
    """The NumPy formula: changes `table`."""
    before, copies = table.copy(), np.zeros((len(table), NOTE), np.int32)
    for first in range(0, len(table), beam):
        rows = slice(first, first + beam)
        position = int(before[first, 0]) + 1
        column, keys = position // size + 1, position % size
        last = min(column, table.shape[1] - 1)
        each = (first + parents[rows] % beam).tolist()
        unused = iter(sorted({*range(first, first + beam)} - {*each}))
        again = [parent in each[:i] for i, parent in enumerate(each)]
        donors = [next(unused) if a else p for a, p in zip(again, each, strict=True)]
        donors = donors if keys else list(range(first, first + beam))
        table[rows, :column] = before[each, :column]
        table[rows, column : column + 1] = before[donors, column : column + 1]
        table[rows, 0] = position
        ends = before[each, last], before[donors, last]
        copies[rows] = np.stack([*ends, np.array(again) * keys], 1)
    return table, copies


def blocks_host(form: Form[BlocksAttrs]) -> HostProgram:
    """On the CPU."""
    beam, size = form.attrs.beam, form.attrs.size

    def call(arrays: list[Array], outs: list[Array]) -> None:
        outs[1][...] = blocks_reference(arrays[0], arrays[1], beam, size)[1]

    return HostProgram("numpy:beam_blocks", "beam_blocks", call)


def blocks_lower(form: Form[BlocksAttrs], caps: Caps) -> Lowered:
    """One launch, a group a prompt."""
    table, parents = form.inputs
    rows, columns = table.shape
    attrs = form.attrs
    scalars = (("beam", attrs.beam), ("size", attrs.size), ("columns", columns))
    refs = (Ref(1, parents), Ref(3, form.outputs[1]), Ref(0, table))
    return Lowered((Call(blocks_kernel, refs, scalars, (), rows // attrs.beam),))


SELECT = Op("beam_select", select_rule, select_reference, select_lower, unit_rows,
            mutates=(0, 1, 2), overwrites=(0, 1, 2),
            doc="the candidates of a beam search that go on")  # fmt: skip
BLOCKS = Op("beam_blocks", blocks_rule, blocks_reference, blocks_lower, unit_rows,
            attrs=BlocksAttrs, mutates=(0,), host=blocks_host,
            doc="the blocks of keys and values of beams that go on")  # fmt: skip
