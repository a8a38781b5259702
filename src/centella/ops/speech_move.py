"""speech_move: the beams of windows of sound go on with the best candidates, in place.

    tokens, parents, running    what `beam_select` chooses of the candidates, where a text ends with
                                one token
    seen    row r is that of its parent, with slot s + beam + r % beam of its window
    notes   those of the parent, with the token that was chosen (as `speech_token` keeps them)
    at      (position, s) = (position + 1, s + beam)

All this lies in States: tokens and parents i32 and running f32, all [windows * beam]; seen bool
[windows * beam, slots]; notes i32 [windows * beam, 6] (`NOTES`); at i32 [windows, 2], the position
of a step's tokens and its first slot, s. So all that the next step begins with is ready. Candidates
are scores f32 and codes i32 (beam * vocab + token), both [windows, count].

One launch, a group a window: a thread has a candidate, then some slots of all beams, which it reads
before it writes one, then a note.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, bool_, f32, i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.op.op import Form, Lowered, Op, Out, unit_rows
from centella.ops import beam as beams
from centella.ops.rows import WARP
from centella.ops.speech_host import BEFORE, LAST, NOTES, STEPS, WAS
from centella.specs import Caps, Spec

THREADS = beams.THREADS  # of a group, at least: a candidate each
MOST = THREADS // len(NOTES)  # beams of a window: a thread each of their notes


class MoveAttrs(Struct, frozen=True):
    """What a step's candidates are of.

    Attributes:
        beam: beams of a window; vocab: tokens that each may go on with.
        end: the token that ends a text; zero: that of the time 0, which all larger ones are, too.
    """

    beam: int
    vocab: int
    end: int
    zero: int


def _move(
    *, beam: int, best: Argument, which: Argument, seen: Argument, notes: Argument, at: Argument,
    tokens: Argument, parents: Argument, running: Argument,
) -> None:  # fmt: skip
    """What threads tell each other: where beams go on from and with what, and notes of before."""
    window, me = lang.group_id(), lang.local_id()
    first, end = window * beam, lang.parameter("end", u32)
    token, parent, score, place = beams.placed(best, which, window, lambda t: t == end)
    froms, chosen = lang.shared(u32, beam), lang.shared(i32, beam)
    with lang.if_((me < lang.parameter("count", u32)) & (place < beam)):
        froms[place], chosen[place] = first + parent, lang.bitcast(token, i32)
        tokens[first + place], running[first + place] = lang.bitcast(token, i32), score
        parents[first + place] = lang.bitcast(first + parent, i32)
    lang.barrier()
    of_beam, note = me // len(NOTES), me % len(NOTES)
    noting, kept = me < beam * len(NOTES), lang.shared(i32, beam * len(NOTES))
    with lang.if_(noting):
        kept[me] = notes[froms[of_beam], note]
    new = lang.bitcast(at[window, 1], u32) + beam
    _see(beam, first, froms, new, seen)
    lang.barrier()
    with lang.if_(noting):
        steps, was = (kept[of_beam * len(NOTES) + n] for n in (STEPS, WAS))
        notes[first + of_beam, note] = _noted(note, kept[me], steps, was, chosen[of_beam])
    with lang.if_(me == 0):
        at[window, 0], at[window, 1] = at[window, 0] + 1, lang.bitcast(new, i32)


def _see(beam: int, first: Any, froms: Any, new: Any, seen: Argument) -> None:
    """Words of what beams see, from the first slot of the next step on their own among them."""
    words, per = lang.parameter("words", u32), seen.dtype.per_word
    for word in lang.range(lang.local_id(), words, lang.workgroup_size()):
        before = [seen.load_word(froms[row], word * per) for row in range(beam)]
        for row, values in enumerate(before):
            after = [value | (word * per + j == new + row) for j, value in enumerate(values)]
            seen.store(first + row, word * per, after)


def _noted(note: Any, own: Any, steps: Any, was: Any, token: Any) -> Any:
    """A note after a token, from what it was."""
    is_time = token >= lang.parameter("zero", i32)
    after = lang.select(note == STEPS, own + 1, own)
    after = lang.select((note == LAST) & is_time, token, after)
    after = lang.select(note == WAS, lang.cast(is_time, i32), after)
    return lang.select(note == BEFORE, lang.select(steps == 0, 1, was), after)


STATES = ("seen", "notes", "at", "tokens", "parents", "running")
kernel: Kernel = Kernel(
    _move, workgroup=THREADS, name="speech_move",
    signature=signature({"best": 2, "which": 2}, {},
                        {"seen": 2, "notes": 2, "at": 2, "tokens": 1, "parents": 1, "running": 1}),
)  # fmt: skip


def rule(specs: tuple[Spec, ...], attrs: MoveAttrs) -> tuple[Out, ...]:
    """The States in the order of `STATES`, then scores f32 and codes i32 of candidates [w, k]."""
    seen, beam = specs[0], attrs.beam
    rows = seen.shape[0] if len(seen.shape) == 2 else -1
    if not 0 < beam <= MOST or rows % beam or not seen.size:
        raise ShapeError(
            f"speech_move: expected seen [windows * {beam}, slots], of up to {MOST} beams, got "
            f"{list(seen.shape)}"
        )
    windows, count = rows // beam, specs[6].shape[-1] if specs[6].shape else 0
    if not beam <= count <= THREADS:
        raise ShapeError(f"speech_move: expected {beam} to {THREADS} candidates, got {count}")
    wanted = {
        "seen": (seen.shape, bool_), "notes": ((rows, len(NOTES)), i32), "at": ((windows, 2), i32),
        "tokens": ((rows,), i32), "parents": ((rows,), i32), "running": ((rows,), f32),
        "scores": ((windows, count), f32), "codes": ((windows, count), i32),
    }  # fmt: skip
    for spec, (name, (shape, dtype)) in zip(specs, wanted.items(), strict=True):
        if spec.shape != shape:
            raise ShapeError(f"speech_move: expected {name} {list(shape)}, got {list(spec.shape)}")
        if spec.dtype is not dtype:
            raise DTypeError(f"speech_move: expected {name} of {dtype.name}, got {spec.dtype.name}")
    return tuple((s.shape, s.dtype) for s in specs[: len(STATES)])


def reference(
    seen: Any, notes: Any, at: Any, tokens: Any, parents: Any, running: Any, best: Array,
    which: Array, beam: int, vocab: int, end: int, zero: int,
) -> Any:  # fmt: skip
    """The NumPy formula: changes the States."""
    ends = np.arange(vocab) == end
    beams.select_reference(tokens, parents, running, best, which, ends)
    of_beam = np.arange(len(seen)) % beam
    at += np.array([1, beam], at.dtype)
    seen[:] = seen[parents]
    seen |= np.arange(seen.shape[1]) == (np.repeat(at[:, 1], beam) + of_beam)[:, None]
    before, is_time = notes[parents], tokens >= zero
    notes[:] = before
    notes[:, STEPS] += 1
    notes[:, LAST] = np.where(is_time, tokens, before[:, LAST])
    notes[:, WAS] = is_time
    notes[:, BEFORE] = np.where(before[:, STEPS] == 0, 1, before[:, WAS])
    return seen, notes, at, tokens, parents, running


def lower(form: Form[MoveAttrs], caps: Caps) -> Lowered:
    """One launch; threads for all slots at once, where a group may have so many."""
    attrs, seen, best = form.attrs, form.inputs[0], form.inputs[6]
    rows, columns = seen.shape
    words = -(-columns // bool_.per_word)
    threads = min(max(-(-words // WARP) * WARP, THREADS), caps.max_workgroup)
    scalars = (("words", words), ("count", best.shape[1]), ("vocab", attrs.vocab),
               ("end", attrs.end), ("zero", attrs.zero))  # fmt: skip
    refs = tuple(Ref(i, form.inputs[i]) for i in (6, 7, 0, 1, 2, 3, 4, 5))
    call = Call(kernel, refs, scalars, (("beam", attrs.beam),), rows // attrs.beam, threads)
    return Lowered((call,))


MOVE = Op("speech_move", rule, reference, lower, unit_rows, attrs=MoveAttrs,
          mutates=tuple(range(len(STATES))), overwrites=(3, 4, 5), doc=__doc__ or "")  # fmt: skip
