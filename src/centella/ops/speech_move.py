"""speech_move: the beams of windows of sound go on from their parents, in place.

    seen    row r is that of its parent, with slot s + beam + r % beam of its window
    notes   those of the parent, with the token that was chosen (as `speech_token` keeps them)
    at      + 1

What is known lies in States: seen bool [windows * beam, slots], notes i32 [windows * beam, 6]
(`NOTES`), at i32 [1, 1]. Tokens and parents are what `beam_select` chose, i32 [windows * beam]; a
parent is one of its window's beams, the number of the row modulo beam. s, i32 [windows], is the
first slot of the step that ends, so what a beam sees is ready for the next one.

One launch: a thread has some slots of a window, of all its beams. It reads them all before it
writes one, and nobody else does either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, bool_, i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.op.op import Form, Lowered, Op, Out, unit_rows
from centella.ops.speech_host import BEFORE, LAST, NOTES, STEPS, WAS
from centella.specs import Caps, Spec

WORKGROUP = 256
MOST = 32  # beams of a window: a thread holds a word of each, a group a thread for each note


class MoveAttrs(Struct, frozen=True):
    """Beams of a window; the token of the time 0, which every larger one is a time as well."""

    beam: int
    zero: int


def _move(
    *, beam: int, tokens: Argument, parents: Argument, slots: Argument, seen: Argument,
    notes: Argument, at: Argument,
) -> None:  # fmt: skip
    """The first group of a window also has its notes, a thread each."""
    words, parts = lang.parameter("words", u32), lang.parameter("parts", u32)
    window, part, me = lang.group_id() // parts, lang.group_id() % parts, lang.local_id()
    first, word = window * beam, part * WORKGROUP + me

    def parent(row: Any) -> Any:
        return first + lang.bitcast(parents[first + row], u32) % beam

    with lang.if_(word < words):
        column = word * seen.dtype.per_word
        before = [seen.load_word(parent(lang.const(row, u32)), column) for row in range(beam)]
        new = lang.bitcast(slots[window], u32) + beam
        for row, values in enumerate(before):
            slots_of = [value | (column + j == new + row) for j, value in enumerate(values)]
            seen.store(first + row, column, slots_of)
    noting = (part == 0) & (me < beam * len(NOTES))
    kept = lang.shared(i32, beam * len(NOTES))
    beam_of, note = me // len(NOTES), me % len(NOTES)
    with lang.if_(noting):
        kept[me] = notes[parent(beam_of), note]
    lang.barrier()
    with lang.if_(noting):
        own, token = kept[me], tokens[first + beam_of]
        steps, was = (kept[beam_of * len(NOTES) + n] for n in (STEPS, WAS))
        is_time = token >= lang.parameter("zero", i32)
        after = lang.select(note == STEPS, own + 1, own)
        after = lang.select((note == LAST) & is_time, token, after)
        after = lang.select(note == WAS, lang.cast(is_time, i32), after)
        after = lang.select(note == BEFORE, lang.select(steps == 0, 1, was), after)
        notes[first + beam_of, note] = after
    with lang.if_(lang.global_id() == 0):
        at[0, 0] = at[0, 0] + 1


kernel: Kernel = Kernel(
    _move, workgroup=WORKGROUP, name="speech_move",
    signature=signature({"tokens": 1, "parents": 1, "slots": 1}, {},
                        {"seen": 2, "notes": 2, "at": 2}),
)  # fmt: skip


def rule(specs: tuple[Spec, ...], attrs: MoveAttrs) -> tuple[Out, ...]:
    """Seen bool [w * beam, slots], notes [w * beam, 6], at [1, 1], i32 but for seen.

    To these States, and tokens and parents [w * beam] and first slots [w].
    """
    seen, beam = specs[0], attrs.beam
    rows = seen.shape[0] if len(seen.shape) == 2 else -1
    if not 0 < beam <= MOST or rows % beam or not seen.size:
        raise ShapeError(
            f"speech_move: expected seen [windows * {beam}, slots], of up to {MOST} beams, got "
            f"{list(seen.shape)}"
        )
    wanted = seen.shape, (rows, len(NOTES)), (1, 1), (rows,), (rows,), (rows // beam,)
    names = "seen", "notes", "at", "tokens", "parents", "slots"
    for name, spec, shape in zip(names, specs, wanted, strict=True):
        dtype = bool_ if name == "seen" else i32
        if spec.shape != shape:
            raise ShapeError(f"speech_move: expected {name} {list(shape)}, got {list(spec.shape)}")
        if spec.dtype is not dtype:
            raise DTypeError(f"speech_move: expected {name} of {dtype.name}, got {spec.dtype.name}")
    return tuple((s.shape, s.dtype) for s in specs[:3])


def reference(
    seen: Any, notes: Any, at: Any, tokens: Array, parents: Array, slots: Array, beam: int,
    zero: int,
) -> Any:  # fmt: skip
    """The NumPy formula: changes `seen`, `notes` and `at`."""
    rows = np.arange(len(seen))
    froms = rows // beam * beam + parents.astype(np.int64) % beam
    seen[:] = seen[froms]
    new = np.repeat(slots.astype(np.int64), beam) + beam + rows % beam
    seen |= np.arange(seen.shape[1]) == new[:, None]
    before, is_time = notes[froms], tokens >= zero
    notes[:] = before
    notes[:, STEPS] += 1
    notes[:, LAST] = np.where(is_time, tokens, before[:, LAST])
    notes[:, WAS] = is_time
    notes[:, BEFORE] = np.where(before[:, STEPS] == 0, 1, before[:, WAS])
    at += 1
    return seen, notes, at


def lower(form: Form[MoveAttrs], caps: Caps) -> Lowered:
    """One launch; groups of words of each window."""
    seen, beam = form.inputs[0], form.attrs.beam
    rows, columns = seen.shape
    words = -(-columns // bool_.per_word)
    parts = -(-words // WORKGROUP)
    scalars = (("words", words), ("parts", parts), ("zero", form.attrs.zero))
    refs = tuple(Ref(i, form.inputs[i]) for i in (3, 4, 5, 0, 1, 2))
    constants = (("beam", beam),)
    return Lowered((Call(kernel, refs, scalars, constants, rows // beam * parts),))


MOVE = Op("speech_move", rule, reference, lower, unit_rows, attrs=MoveAttrs, mutates=(0, 1, 2),
          doc=__doc__ or "")  # fmt: skip
