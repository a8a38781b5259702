"""speech_beams: how likely the texts are that beams of windows of sound may become.

    y[w, i * vocab + t] = running[w, i] + log softmax(l[w, i])_t   where `speech_token` would allow
                                                                   token t in beam i, else NEVER

Logits l are f32 [windows, beam, vocab], levels i32 [vocab], notes i32 [windows, beam, 6] (`NOTES`),
running f32 [windows, beam] the log-probabilities of the texts so far. `speech_scores` is the same
of log-probabilities that are known.

Two launches: the survey of `speech_token` also sums up all tokens of a part of a row; then each
group puts the parts of a row together, and has some of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import Array, f32, i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.op.axes import Axes, axes
from centella.op.op import Form, Lowered, Op, Out
from centella.ops import speech_scores
from centella.ops.layout import rows_of, takes_rows
from centella.ops.rows import Item, Row, Team
from centella.ops.speech import Rules, surveyed, times_are_likelier
from centella.ops.speech_host import LEAST, NEVER, NOTES, SpeechAttrs
from centella.specs import Caps, Spec

WORKGROUP = 256
EACH = 4  # tokens of a thread, a group apart


def _beams(
    *, timed: bool, team: Team, logits: Argument, levels: Argument, notes: Argument,
    running: Argument, figures: Argument, wholes: Argument, y: Argument,
) -> None:  # fmt: skip
    """A group has some tokens of a row, and all its threads know what the survey has found."""
    columns, beam, groups = (lang.parameter(n, u32) for n in ("columns", "beam", "groups"))
    row, group = lang.group_id() // groups, lang.group_id() % groups
    top, total = _together(team, row, lambda at: (wholes[at * 2], wholes[at * 2 + 1]))
    rules, likelier, scale = Rules(notes, row, timed), None, lang.log(total)
    if timed:  # four figures of a part: weight and largest logit of text, then of times
        text = _top(team, row, lambda at: figures[at * 4 + 1])
        time, weight = _together(team, row, lambda at: (figures[at * 4 + 2], figures[at * 4 + 3]))
        likelier = times_are_likelier(text, time, weight)
    so_far = running[row // beam, row % beam]
    first = group * (WORKGROUP * EACH) + lang.local_id()
    tokens = [first + j * WORKGROUP for j in range(EACH)]
    inside = [lang.minimum(token, columns - 1) for token in tokens]
    values = [(logits[row, token], levels[token]) for token in inside]
    for token, (value, ban) in zip(tokens, values, strict=True):
        may = rules.allowed(token, lang.bitcast(ban, u32))
        if likelier is not None:
            may = may & (rules.is_time(token) | ~likelier)
        with lang.if_(token < columns):
            score = lang.select(may, value - top - scale, NEVER)
            y[row // beam, row % beam * columns + token] = score + so_far


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
    """Logits f32 [w, b, v], levels i32 [v], notes i32 [w, b, 6], running f32 [w, b] to [w, b v]."""
    logits, *others = specs
    if len(logits.shape) != 3 or not logits.shape[2]:
        raise ShapeError(
            f"speech_beams: expected logits [windows, beam, vocab], got {list(logits.shape)}"
        )
    w, b, v = logits.shape
    wanted = [[v], [w, b, len(NOTES)], [w, b]]
    if [list(s.shape) for s in others] != wanted:
        raise ShapeError(
            f"speech_beams: expected levels, notes and scores so far {wanted}, got "
            f"{[list(s.shape) for s in others]}"
        )
    if [s.dtype for s in specs] != [f32, i32, i32, f32]:
        names = [s.dtype.name for s in specs]
        raise DTypeError(f"speech_beams: expected f32, i32, i32 and f32, got {names}")
    return (((w, b * v), f32),)


def reference(logits: Array, levels: Array, notes: Array, running: Array, **named: Any) -> Array:
    """The NumPy formula."""
    w, b, v = logits.shape
    own = logits.reshape(w * b, v)
    own = own - own.max(-1, keepdims=True)
    own = own - np.log(np.exp(own).sum(-1, keepdims=True))
    allowed = speech_scores.reference(own, levels, notes.reshape(w * b, -1), **named)
    return (allowed.reshape(w, b, v) + running[:, :, None]).reshape(w, b * v)


def lower(form: Form[SpeechAttrs], caps: Caps) -> Lowered:
    """Two launches: parts of rows, then tokens."""
    logits, levels, notes, running = form.inputs
    (y,), attrs = form.outputs, form.attrs
    w, b, v = logits.shape
    reads = {"logits": Ref(0, rows_of(logits)), "levels": Ref(1, levels),
             "notes": Ref(2, rows_of(notes))}  # fmt: skip
    survey, temporaries, parts = surveyed(reads, attrs, 5, caps, wholes=True)
    figures, _, wholes = (Ref(5 + i, spec) for i, spec in enumerate(temporaries))
    refs = {**reads, "running": Ref(3, running), "figures": figures, "wholes": wholes}
    ranks = {name: len(ref.spec.shape) for name, ref in refs.items()}
    team = Team(WORKGROUP, WORKGROUP, -(-parts // WORKGROUP), 0, False, caps.shuffles)
    groups = -(-v // (WORKGROUP * EACH))
    call = Call(
        kernel, (*refs.values(), Ref(4, y)),
        (("columns", v), ("beam", b), ("groups", groups), ("parts", parts), *attrs.tokens),
        (("timed", attrs.timed), ("team", team)), w * b * groups,
        signature=signature(ranks, {"y": 2}),
    )  # fmt: skip
    return Lowered((survey, call), temporaries)


def axes_of(form: Form[SpeechAttrs]) -> Axes:
    """Windows."""
    return axes(["w..", ".", "w..", "w."], ["w."])


BEAMS = Op("speech_beams", rule, reference, lower, takes_rows, attrs=SpeechAttrs, axes=axes_of,
           doc=__doc__ or "")  # fmt: skip
