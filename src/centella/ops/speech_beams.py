"""speech_beams: the likeliest texts that beams of windows of sound may become.

    y[w, i * vocab + t] = running[w, i] + log softmax(l[w, i])_t   where `speech_token` would allow
                                                                   token t in beam i, else NEVER
    scores, codes       = topk(y, 2 * beam)

Logits l are f32 [windows, beam, vocab], levels i32 [vocab], notes i32 [windows, beam, 6] (`NOTES`),
running f32 [windows, beam] the log-probabilities of the texts so far. `speech_scores` is y of
log-probabilities that are known. Of 2 * beam texts at most beam end with one token.

Three launches: the survey of `speech_token` also sums up all tokens of a part of a row; then each
group puts the parts of a row together, and chooses among some of its tokens as many as are wanted;
then `topk` chooses among those. Of equal candidates the first has the lowest code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from centella import lang
from centella.dtypes import Array, f32, i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.op.axes import Axes, axes
from centella.op.op import Form, Lowered, Op, Out
from centella.ops import speech_scores, topk
from centella.ops.layout import rows_of, takes_rows
from centella.ops.rows import Item, Row, Team
from centella.ops.speech import Rules, surveyed, times_are_likelier
from centella.ops.speech_host import LEAST, NEVER, NOTES, SpeechAttrs
from centella.specs import Caps, Spec, make_spec

WORKGROUP = 128
# Of how many are chosen at most: tokens of a thread.
EACH: tuple[tuple[int, int], ...] = ((16, 16), (topk.MOST, 8))


class _Row(Struct, frozen=True, eq=False):
    """Shared memory as the row of an argument."""

    memory: Any

    def __getitem__(self, at: tuple[Any, Any]) -> Any:
        return self.memory[at[1]]


def _beams(
    *, timed: bool, team: Team, each: int, listed: int, logits: Argument, levels: Argument,
    notes: Argument, running: Argument, figures: Argument, wholes: Argument, scores: Argument,
    codes: Argument,
) -> None:  # fmt: skip
    """A group chooses among some tokens of a row."""
    columns, beam, k, groups = (lang.parameter(n, u32) for n in ("columns", "beam", "k", "groups"))
    row, group = lang.group_id() // groups, lang.group_id() % groups
    score = _scored(timed, team, row, notes, figures, wholes)
    so_far, memory = running[row // beam, row % beam], lang.shared(f32, each * WORKGROUP)
    few, more = columns // groups, columns % groups  # so many groups have a token more
    first = group * few + lang.minimum(group, more)
    count = few + lang.select(group < more, lang.const(1, u32), lang.const(0, u32))
    slots = [lang.local_id() + j * WORKGROUP for j in range(each)]
    tokens = [first + lang.minimum(slot, count - 1) for slot in slots]
    values = [(logits[row, token], levels[token]) for token in tokens]
    for slot, token, (value, ban) in zip(slots, tokens, values, strict=True):
        memory[slot] = score(token, value, ban) + so_far
    lang.barrier()
    zero = lang.const(0, u32)
    part = topk.Part(_Row(memory), zero, zero, count, each * WORKGROUP, 1, topk.TOGETHER)
    listing = lang.shared(u32, listed), lang.shared(u32, listed)
    found = topk.list_best(part, True, k, listing, listed)
    for rank, _, at in topk.ranked(listing, found, k):
        to = lang.group_id() % (beam * groups) * k + rank
        scores[row // beam, to] = memory[at]
        codes[row // beam, to] = row % beam * columns + first + at


def _scored(
    timed: bool, team: Team, row: Any, notes: Argument, figures: Argument, wholes: Argument
) -> Callable[[Any, Any, Any], Any]:
    """The score of a token of a row by its logit and level; all threads know what was surveyed."""
    top, total = _together(team, row, lambda at: (wholes[at * 2], wholes[at * 2 + 1]))
    rules, likelier, scale = Rules(notes, row, timed), None, lang.log(total)
    if timed:  # four figures of a part: weight and largest logit of text, then of times
        text = _top(team, row, lambda at: figures[at * 4 + 1])
        time, weight = _together(team, row, lambda at: (figures[at * 4 + 2], figures[at * 4 + 3]))
        likelier = times_are_likelier(text, time, weight)

    def score(token: Any, value: Any, ban: Any) -> Any:
        may = rules.allowed(token, lang.bitcast(ban, u32))
        if likelier is not None:
            may = may & (rules.is_time(token) | ~likelier)
        return lang.select(may, value - top - scale, NEVER)

    return score


def _top(team: Team, row: Any, value: Callable[[Any], Any]) -> Any:
    """The largest figure of a row's parts, in every thread."""
    parts = lang.parameter("parts", u32)
    of = Row(team, 1, parts, row)
    return of.total(lambda item: [value(row * parts + item.column)], LEAST, "max")


def _together(team: Team, row: Any, figures: Callable[[Any], tuple[Any, Any]]) -> tuple[Any, Any]:
    """The largest logit of a row, and the weights of its tokens relative to that.

    Args:
        figures: the same of a part, the weights first.
    """
    parts = lang.parameter("parts", u32)
    of = Row(team, 1, parts, row)
    kept = of.kept(lambda item: figures(row * parts + item.column))
    top = of.total(lambda item: [kept(item)[1]], LEAST, "max")

    def weight(item: Item) -> list[Any]:
        own, largest = kept(item)
        return [own * lang.exp(largest - top)]

    return top, of.total(weight, 0.0, "add")


kernel: Kernel = Kernel(_beams, workgroup=WORKGROUP, name="speech_beams")


def rule(specs: tuple[Spec, ...], attrs: SpeechAttrs) -> tuple[Out, ...]:
    """Logits f32 [w, b, v], levels i32 [v], notes i32 [w, b, 6], running f32 [w, b].

    To scores f32 and codes i32 [w, 2 b].
    """
    logits, *others = specs
    if len(logits.shape) != 3 or logits.shape[2] < 2:
        raise ShapeError(
            f"speech_beams: expected logits [windows, beam, vocab] of 2 tokens or more, got "
            f"{list(logits.shape)}"
        )
    w, b, v = logits.shape
    if not 0 < 2 * b <= topk.MOST:
        raise ShapeError(f"speech_beams: expected 1 to {topk.MOST // 2} beams, got {b}")
    wanted = [[v], [w, b, len(NOTES)], [w, b]]
    if [list(s.shape) for s in others] != wanted:
        raise ShapeError(
            f"speech_beams: expected levels, notes and scores so far {wanted}, got "
            f"{[list(s.shape) for s in others]}"
        )
    if [s.dtype for s in specs] != [f32, i32, i32, f32]:
        names = [s.dtype.name for s in specs]
        raise DTypeError(f"speech_beams: expected f32, i32, i32 and f32, got {names}")
    return ((w, 2 * b), f32), ((w, 2 * b), i32)


def reference(
    logits: Array, levels: Array, notes: Array, running: Array, **named: Any
) -> tuple[Array, Array]:
    """The NumPy formula."""
    w, b, v = logits.shape
    own = logits.reshape(w * b, v)
    own = own - own.max(-1, keepdims=True)
    own = own - np.log(np.exp(own).sum(-1, keepdims=True))
    allowed = speech_scores.reference(own, levels, notes.reshape(w * b, -1), **named)
    scores = (allowed.reshape(w, b, v) + running[:, :, None]).reshape(w, b * v)
    return topk.reference(scores, 2 * b)


def lower(form: Form[SpeechAttrs], caps: Caps) -> Lowered:
    """Three launches: parts of rows, then tokens, then candidates."""
    logits, levels, notes, running = form.inputs
    (best, which), attrs = form.outputs, form.attrs
    w, b, v = logits.shape
    reads = {"logits": Ref(0, rows_of(logits)), "levels": Ref(1, levels),
             "notes": Ref(2, rows_of(notes))}  # fmt: skip
    survey, temporaries, parts = surveyed(reads, attrs, 6, caps, wholes=True)
    each = next(tokens for most, tokens in EACH if 2 * b <= most)
    k, groups = min(2 * b, v), -(-v // (WORKGROUP * each))
    written = tuple(make_spec((w, b * groups * k), dtype, 16) for dtype in (f32, u32))
    temporaries = (*temporaries, *written)
    figures, _, wholes, *candidates = (Ref(6 + i, spec) for i, spec in enumerate(temporaries))
    refs = {**reads, "running": Ref(3, running), "figures": figures, "wholes": wholes}
    writes = dict(zip(("scores", "codes"), candidates, strict=True))
    ranks = {name: len(ref.spec.shape) for name, ref in refs.items()}
    team = Team(WORKGROUP, WORKGROUP, -(-parts // WORKGROUP), 0, False, caps.shuffles)
    call = Call(
        kernel, (*refs.values(), *writes.values()),
        (("columns", v), ("beam", b), ("k", k), ("groups", groups), ("parts", parts),
         *attrs.tokens),
        (("timed", attrs.timed), ("team", team), ("each", each), ("listed", each * k)),
        w * b * groups, signature=signature(ranks, dict.fromkeys(writes, 2)),
    )  # fmt: skip
    chosen = {"values": Ref(4, best), "indices": Ref(5, which)}
    data = {"x": candidates[0], "codes": candidates[1]}
    choose, between = topk.launches(data, chosen, 2 * b, 6 + len(temporaries))
    return Lowered((survey, call, *choose), (*temporaries, *between))


def axes_of(form: Form[SpeechAttrs]) -> Axes:
    """Windows."""
    return axes(["w..", ".", "w..", "w."], ["w.", "w."])


BEAMS = Op("speech_beams", rule, reference, lower, takes_rows, attrs=SpeechAttrs, axes=axes_of,
           doc=__doc__ or "")  # fmt: skip
