"""speech_scores: scores of tokens where the rules of transcripts allow them, else `NEVER`.

    y_i = l_i where `speech_token` would allow token i, else NEVER

For beams, which need more than one token of a row. Where times come it is two launches: the survey
of `speech_token` says whether the times together are likelier than every other token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from centella import lang
from centella.dtypes import Array, f32, i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.axes import Axes, axes
from centella.op.op import Form, Lowered, Op, Out
from centella.ops.rows import chunked, load, place_of, rows_call, width_of
from centella.ops.speech import Rules, surveyed, takes, times_are_likelier
from centella.ops.speech_host import LEAST, NEVER, NOTES, SpeechAttrs, allowed
from centella.specs import Caps, Spec

WORKGROUP = 256


def _mask(
    *, chunk: bool, timed: bool, scores: Argument, levels: Argument, notes: Argument, y: Argument,
    figures: Argument | None = None,
) -> None:  # fmt: skip
    """A thread has one chunk (or word) of a row."""
    columns, width = lang.parameter("columns", u32), width_of(y, chunk)
    with lang.if_(lang.global_id() < lang.parameter("threads", u32)):
        row, column = place_of(width)
        rules = Rules(notes, row, timed)
        values = load(scores, row, column, columns, width, chunk)
        bans = levels.load(column) if chunk else [levels[column]]
        likelier = _likelier(figures, row) if timed else None
        out = []
        for j, (value, ban) in enumerate(zip(values, bans, strict=True)):
            may = rules.allowed(column + j, lang.bitcast(ban, u32))
            if likelier is not None:
                may = may & (rules.is_time(column + j) | ~likelier)
            out.append(lang.select(may, value, NEVER))
        y.store(row, column, out)


def _likelier(figures: Any, row: Operand) -> Expr:
    """Whether the times of a row together are likelier than its likeliest text."""
    parts = lang.parameter("parts", u32)
    text, time, total = lang.var(LEAST), lang.var(LEAST), lang.var(0.0)
    for part in lang.range(lang.const(0, u32), parts):
        at = (row * parts + part) * 4  # weight and largest score of text, then of times
        text.set(lang.maximum(text.get(), figures[at + 1]))
        time.set(lang.maximum(time.get(), figures[at + 3]))
    for part in lang.range(lang.const(0, u32), parts):
        at = (row * parts + part) * 4
        total.set(total.get() + figures[at + 2] * lang.exp(figures[at + 3] - time.get()))
    return times_are_likelier(text.get(), time.get(), total.get())


kernel: Kernel = Kernel(_mask, workgroup=WORKGROUP, name="speech_scores")


def rule(specs: tuple[Spec, ...], attrs: SpeechAttrs) -> tuple[Out, ...]:
    """Scores f32 [b, v], levels i32 [v], notes i32 [b, 6] to f32 [b, v]."""
    scores, levels, notes = specs
    if len(scores.shape) != 2 or not scores.shape[1]:
        raise ShapeError(f"speech_scores: expected scores [rows, vocab], got {list(scores.shape)}")
    b, v = scores.shape
    if levels.shape != (v,) or notes.shape != (b, len(NOTES)):
        raise ShapeError(
            f"speech_scores: expected levels [{v}] and notes [{b}, {len(NOTES)}], got "
            f"{list(levels.shape)} and {list(notes.shape)}"
        )
    if (scores.dtype, levels.dtype, notes.dtype) != (f32, i32, i32):
        names = [s.dtype.name for s in specs]
        raise DTypeError(f"speech_scores: expected f32, i32 and i32, got {names}")
    return (((b, v), f32),)


def reference(scores: Array, levels: Array, notes: Array, **named: Any) -> Array:
    """The NumPy formula."""
    attrs = SpeechAttrs(**named)
    y: Array = np.empty_like(scores)
    for row, values in enumerate(scores):
        masked = np.where(allowed(levels, notes[row], attrs), values, values.dtype.type(NEVER))
        weights = np.exp(masked - masked.max())
        of_times, of_text = weights[attrs.zero :].sum(), weights[: attrs.zero].max(initial=0.0)
        if attrs.timed and of_times > of_text:
            masked[: attrs.zero] = NEVER
        y[row] = masked
    return y


def lower(form: Form[SpeechAttrs], caps: Caps) -> Lowered:
    """One launch, or with times a survey before it."""
    scores, levels, notes = form.inputs
    (y,), attrs = form.outputs, form.attrs
    rows, columns = scores.shape
    chunk = chunked(scores, levels, y)
    scalars: dict[str, int | float] = {"columns": columns, **dict(attrs.tokens)}
    before: tuple[Call, ...] = ()
    temporaries: tuple[Spec, ...] = ()
    refs = {"scores": Ref(0, scores), "levels": Ref(1, levels), "notes": Ref(2, notes)}
    if attrs.timed:
        reads = {"logits": Ref(0, scores), "levels": Ref(1, levels), "notes": Ref(2, notes)}
        survey, temporaries, scalars["parts"] = surveyed(reads, attrs, 4, caps)
        before = (survey,)
        refs["figures"] = Ref(4, temporaries[0])
    params = signature({name: len(ref.spec.shape) for name, ref in refs.items()}, {"y": 2})
    constants = (("chunk", chunk), ("timed", attrs.timed))
    call = rows_call(
        kernel, (*refs.values(), Ref(3, y)), rows, columns, width_of(y, chunk), scalars, constants,
        params,
    )  # fmt: skip
    return Lowered((*before, call), temporaries)


def axes_of(form: Form[SpeechAttrs]) -> Axes:
    """Rows."""
    return axes(["b.", ".", "b."], ["b."])


SPEECH_SCORES = Op("speech_scores", rule, reference, lower, takes, attrs=SpeechAttrs,
                   axes=axes_of, doc=__doc__ or "")  # fmt: skip
