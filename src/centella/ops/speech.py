"""speech_token: the next token of each window of sound, chosen by the rules of transcripts.

    allowed   tokens of level 0; of level 1 but for a text's first token; and with `timed`
        first token           times up to `latest`
        after one time        the end, special tokens, times from the last one on
        after two times       text
        else                  text, times after the last one
    weigh     exp(l) of the times together > exp(l) of each text token: only times are allowed
    token     argmax over allowed of l, or of l / t - log(-log(u)); `end` for a row that has ended
    sum       + log softmax(l over allowed) at the token

Source: Radford et al. 2022, "Robust Speech Recognition via Large-Scale Weak Supervision". u is the
hash of `sample`, drawn by the number of the token and the row's seed. What is known of a row lies
in States: notes i32 [batch, 6] (`NOTES`), sums f32 [batch, 2] (log-probability, temperature), and
the token [batch, 1]. A row gives -1 where the largest logit of what is allowed is not finite: where
one is NaN or infinite, or all are minus infinity.

Two launches: groups survey parts of rows, text and times apart; a team a row puts them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from centella import lang
from centella.dtypes import f32, i32, u32
from centella.emit.program import Call, Kernel, Ref
from centella.errors import DTypeError, ShapeError
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.lang.values import Expr, Operand
from centella.op.axes import Axes, axes
from centella.op.op import Form, Lowered, Op, Out
from centella.ops.rows import THREADS, WALKERS, Item, Row, Team, Values, chunked, load, team_of
from centella.ops.sample_row import traced_noise
from centella.ops.speech_host import (
    BEFORE,
    ENDED,
    LAST,
    LEAST,
    NEVER,
    NOTES,
    SEED,
    STEPS,
    WAS,
    SpeechAttrs,
    host,
    reference,
)
from centella.specs import Caps, Spec, make_spec

INFINITE = 0x7F800000  # the bits of the f32
PART = 2048  # tokens of a group
NONE = 0xFFFFFFFF


class Rules:
    """Which tokens may come in a row, as its notes say."""

    end: Any
    zero: Any
    step: Any

    def __init__(self, notes: Any, row: Any, timed: bool) -> None:
        self._timed = timed
        self.end, self.zero, self._no_times, self._latest = (
            lang.parameter(n, u32) for n in ("end", "zero", "no_timestamps", "latest")
        )
        self.step = lang.bitcast(notes[row, STEPS], u32)
        self._first = self.step == 0
        if not timed:
            return
        last, was, before = (lang.bitcast(notes[row, c], u32) for c in (LAST, WAS, BEFORE))
        opened, closed = (was != 0) & (before == 0), (was != 0) & (before != 0)
        after = lang.select(opened, self.end, 0)
        self._text_from = lang.select(self._first, self.zero, after)
        self._time_from = lang.select(opened, last, last + 1)
        self._time_to = lang.select(self._first, self._latest, lang.select(closed, 0, NONE))

    def is_time(self, token: Operand) -> Any:
        """Whether a token is a time."""
        return token >= self.zero

    def allowed(self, token: Any, level: Any) -> Any:
        """Whether it may come."""
        allowed = (level == 0) | ((level == 1) & ~self._first)
        if not self._timed:
            return allowed
        time = (token >= self._time_from) & (token <= self._time_to)
        text = (token >= self._text_from) & (token != self._no_times)
        is_time = self.is_time(token)
        return allowed & ((is_time & time) | (text & ~is_time))


def _survey(
    *, chunk: bool, team: Team, timed: bool, random: bool, logits: Argument, levels: Argument,
    notes: Argument, figures: Argument, places: Argument, sums: Any = None, wholes: Any = None,
) -> None:  # fmt: skip
    """A team has a part of a row: figures of its text, and of its times where they may come.

    With `wholes` also the weights of all its tokens, allowed or not, and its largest logit.
    """
    columns, part, parts, rows = (
        lang.parameter(n, u32) for n in ("columns", "part", "parts", "rows")
    )
    width = logits.dtype.per_chunk if chunk else 1
    row = Row(team, width, lambda n: lang.minimum(columns - n % parts * part, part), rows)
    at, first = row.number // parts, row.number % parts * part
    rules = Rules(notes, at, timed)
    cold: Any = 1.0 / sums[at, 1] if random else None
    seed: Any = lang.bitcast(notes[at, SEED], u32) if random else None

    def token(item: Item, j: int) -> Any:
        return first + item.column + j

    def loaded(item: Item) -> Values:
        return load(logits, at, first + item.column, columns, width, chunk)

    of_all = loaded if wholes is None else row.kept(loaded)
    if wholes is not None:
        top = row.total(of_all, LEAST, "max")
        weight = row.total(lambda item: [lang.exp(v - top) for v in of_all(item)], 0.0, "add")
        with lang.if_(row.first()):
            wholes[row.number * 2], wholes[row.number * 2 + 1] = weight, top

    def read(item: Item) -> Values:
        values = of_all(item)
        start = first + item.column
        bans = levels.load(start) if chunk else [levels[start]]
        pairs = zip(values, bans, strict=True)
        return [
            lang.select(rules.allowed(token(item, j), lang.bitcast(ban, u32)), value, NEVER)
            for j, (value, ban) in enumerate(pairs)
        ]

    kept = row.kept(read)

    def scored(item: Item) -> Values:
        return [
            lang.maximum(v * cold - traced_noise(token(item, j), rules.step, seed), LEAST)
            for j, v in enumerate(kept(item))
        ]

    scores = row.kept(scored) if random else kept
    for kind in range(1 + timed):  # text, times

        def own(item: Item, values: Values, other: Any, kind: int = kind) -> Values:
            if not timed:
                return values
            times = [rules.is_time(token(item, j)) for j in range(len(values))]
            pairs = [(v, other) if kind else (other, v) for v in values]
            return [lang.select(t, *p) for t, p in zip(times, pairs, strict=True)]

        results = _figures(row, kept, scores, own, token)
        with lang.if_(row.first()):
            to = row.number * (1 + timed) + kind
            places[to] = results.pop()
            for j, value in enumerate(results):
                figures[to * len(results) + j] = value


def _figures(
    row: Row, logits: Callable[[Item], Values], scores: Callable[[Item], Values],
    own: Callable[[Item, Values, Any], Values], token: Callable[[Item, int], Any],
) -> list[Expr]:  # fmt: skip
    """Of a part's tokens of a kind: sum of weights, largest logit, largest score, the token.

    Where scores are the logits the largest is there once.
    """
    top = row.total(lambda item: own(item, logits(item), LEAST), LEAST, "max")
    tops = [top]
    if scores is not logits:
        tops.append(row.total(lambda item: own(item, scores(item), LEAST), LEAST, "max"))

    def weights(item: Item) -> Values:
        return own(item, [lang.exp(v - top) for v in logits(item)], 0.0)

    def hits(item: Item) -> Values:
        pairs = enumerate(scores(item))
        places = [lang.select(s == tops[-1], token(item, j), NONE) for j, s in pairs]
        return own(item, places, NONE)

    return [row.total(weights, 0.0, "add"), *tops, row.total(hits, NONE, "min")]


def _take(
    *, team: Team, timed: bool, random: bool, figures: Argument, places: Argument, notes: Argument,
    sums: Argument, token: Argument, y: Argument, logits: Any = None, levels: Any = None,
) -> None:  # fmt: skip
    """A team has a row: text or times, the token, and what is noted of it.

    Logits and levels tell the logit of a token that is drawn.
    """
    parts, rows = lang.parameter("parts", u32), lang.parameter("rows", u32)
    row = Row(team, 1, parts, rows)
    results = []
    for kind in range(1 + timed):

        def at(item: Item, kind: int = kind) -> Any:
            return (row.number * parts + item.column) * (1 + timed) + kind

        def figure(item: Item, j: int, at: Any = at) -> Any:
            return figures[at(item) * (2 + random) + j]

        results.append(_put_together(row, figure, lambda item, at=at: places[at(item)], 1 + random))
    with lang.if_(row.first()):
        winner, top, weight = _chosen(results)
        own = top
        if random:
            column = lang.select(winner == NONE, 0, winner)
            level = lang.bitcast(levels[column], u32)
            may = Rules(notes, row.number, timed).allowed(column, level)
            own = lang.select(may, logits[row.number, column], NEVER)
        gained = lang.select(winner == NONE, math.nan, (own - top) - lang.log(weight))
        _note(winner, gained, row.number, notes, sums, token, y)


def _put_together(
    row: Row, figure: Callable[[Item, int], Any], column_of: Callable[[Item], Any], last: int
) -> list[Expr]:
    """As `_figures`, of a whole row; `last` is the figure of the largest score."""
    tops = [
        row.total(lambda item, j=j: [figure(item, j)], LEAST, "max") for j in range(1, last + 1)
    ]

    def weight(item: Item) -> Values:
        return [figure(item, 0) * lang.exp(figure(item, 1) - tops[0])]

    def hit(item: Item) -> Values:
        return [lang.select(figure(item, last) == tops[-1], column_of(item), NONE)]

    return [row.total(weight, 0.0, "add"), tops[0], tops[-1], row.total(hit, NONE, "min")]


def times_are_likelier(text: Operand, time: Operand, weight: Operand) -> Expr:
    """Whether times together are likelier than each text token.

    Args:
        text, time: the largest scores; weight: of the times, relative to theirs.
    """
    most = lang.maximum(text, time)
    return weight * lang.exp(time - most) > lang.exp(text - most)


def _chosen(results: list[Any]) -> tuple[Expr, Expr, Expr]:
    """The token, of text or of times; of what is allowed the largest logit, and the weights.

    `NONE` is the token where no allowed logit can be the largest.
    """
    weight, top, best, winner = results[0]
    if len(results) > 1:
        time_weight, time_top, time_best, time_winner = results[1]
        most = lang.maximum(top, time_top)
        of_times, of_text = (lang.exp(t - most) for t in (time_top, top))
        likelier = times_are_likelier(top, time_top, time_weight)
        winner = lang.select(likelier | (time_best > best), time_winner, winner)
        weight = lang.select(likelier, time_weight, weight * of_text + time_weight * of_times)
        top = lang.select(likelier, time_top, most)
    else:
        most = top
    finite = (lang.bitcast(most, u32) & 0x7FFFFFFF) < INFINITE
    return lang.select(finite & (most > NEVER), winner, NONE), top, weight


def _note(
    winner: Operand, gained: Operand, row: Any, notes: Any, sums: Any, token: Any, y: Any
) -> None:  # fmt: skip
    """One thread writes what is known of the row now."""
    end, zero = lang.parameter("end", u32), lang.parameter("zero", u32)
    ended = notes[row, ENDED] != 0
    chosen = lang.select(ended, end, winner)
    sums[row, 0] = sums[row, 0] + lang.select(ended, 0.0, gained)
    steps, was, last = notes[row, STEPS], notes[row, WAS], notes[row, LAST]
    is_time = (chosen >= zero) & (chosen != NONE)
    result = lang.bitcast(chosen, i32)
    notes[row, BEFORE] = lang.select(steps == 0, 1, was)
    notes[row, LAST] = lang.select(is_time, result, last)
    notes[row, WAS] = lang.cast(is_time, i32)
    notes[row, ENDED] = lang.cast(ended | (chosen == end), i32)
    notes[row, STEPS] = steps + 1
    token[row, 0] = result
    y[row] = result


survey_kernel: Kernel = Kernel(_survey, workgroup=WALKERS, name="speech_survey")
take_kernel: Kernel = Kernel(_take, workgroup=THREADS, name="speech_token")


def rule(specs: tuple[Spec, ...], attrs: SpeechAttrs) -> tuple[Out, ...]:
    """Notes [b, 6], sums f32 [b, 2], token [b, 1], logits f32 [b, v], levels [v]; i32 but for f32.

    To these States, and tokens i32 [b].
    """
    logits = specs[3]
    if len(logits.shape) != 2 or not logits.shape[1]:
        raise ShapeError(f"speech_token: expected logits [batch, vocab], got {list(logits.shape)}")
    b, v = logits.shape
    wanted = ((b, len(NOTES)), i32), ((b, 2), f32), ((b, 1), i32), ((b, v), f32), ((v,), i32)
    names = ("notes", "sums", "token", "logits", "levels")
    for name, spec, (shape, dtype) in zip(names, specs, wanted, strict=True):
        if spec.shape != shape:
            raise ShapeError(f"speech_token: expected {name} {list(shape)}, got {list(spec.shape)}")
        if spec.dtype is not dtype:
            raise DTypeError(
                f"speech_token: expected {name} of {dtype.name}, got {spec.dtype.name}"
            )
    return (*wanted[:3], ((b,), i32))


# -- how it is launched ---------------------------------------------------------------------------


def surveyed(
    reads: Mapping[str, Ref], attrs: SpeechAttrs, first: int, caps: Caps, *, wholes: bool = False
) -> tuple[Call, tuple[Spec, ...], int]:
    """The survey of rows: its launch, the memory that it writes, and parts of a row.

    Args:
        reads: logits, levels and notes, with `random` sums; first: temporary of the op.
        wholes: whether all tokens are summed up, too: two figures of a part.
    """
    logits, levels = reads["logits"].spec, reads["levels"].spec
    rows, columns = logits.shape
    part = columns
    if columns > PART:
        part = -(-columns // (16 * -(-columns // PART))) * 16
    parts = -(-columns // part)
    chunk, kinds = chunked(logits, levels), 1 + attrs.timed
    team = team_of(part, f32.per_chunk if chunk else 1, caps, columns - (parts - 1) * part)
    figures = make_spec((rows * parts * kinds * (2 + attrs.random),), f32, 4)
    places = make_spec((rows * parts * kinds,), u32, 4)
    written = {"figures": figures, "places": places}
    if wholes:
        written["wholes"] = make_spec((rows * parts * 2,), f32, 4)
    ranks = {name: len(ref.spec.shape) for name, ref in reads.items()}
    call = Call(
        survey_kernel,
        (*reads.values(), *(Ref(first + i, spec) for i, spec in enumerate(written.values()))),
        (("columns", columns), ("part", part), ("parts", parts), ("rows", rows * parts),
         *attrs.tokens),
        (("chunk", chunk), ("random", attrs.random), ("timed", attrs.timed), ("team", team)),
        team.groups(rows * parts), team.threads, signature(ranks, dict.fromkeys(written, 1)),
    )  # fmt: skip
    return call, tuple(written.values()), parts


def lower(form: Form[SpeechAttrs], caps: Caps) -> Lowered:
    """Two launches: parts of rows, then rows."""
    notes, sums, token, logits, levels = form.inputs
    attrs, rows = form.attrs, logits.shape[0]
    reads = {"logits": Ref(3, logits), "levels": Ref(4, levels), "notes": Ref(0, notes)}
    if attrs.random:
        reads["sums"] = Ref(1, sums)
    survey, scratch, parts = surveyed(reads, attrs, 9, caps)
    few = team_of(parts, 1, caps)
    drawn = {n: reads[n] for n in ("logits", "levels") if attrs.random}
    ranks = {"figures": 1, "places": 1, **{n: len(ref.spec.shape) for n, ref in drawn.items()}}
    take = Call(
        take_kernel,
        (Ref(9, scratch[0]), Ref(10, scratch[1]), *drawn.values(), Ref(8, form.outputs[3]),
         Ref(0, notes), Ref(1, sums), Ref(2, token)),
        (("parts", parts), ("rows", rows), *attrs.tokens),
        (("random", attrs.random), ("timed", attrs.timed), ("team", few)),
        few.groups(rows), few.threads,
        signature(ranks, {"y": 1}, {"notes": 2, "sums": 2, "token": 2}),
    )  # fmt: skip
    return Lowered((survey, take), scratch)


def takes(index: int, spec: Spec) -> bool:
    """Rows of neighbouring elements."""
    return spec.unit_rows


def axes_of(form: Form[SpeechAttrs]) -> Axes:
    """Windows."""
    return axes(["b.", "b.", "b.", "b.", "."], ["b.", "b.", "b.", "b"])


SPEECH = Op("speech_token", rule, reference, lower, takes, attrs=SpeechAttrs, mutates=(0, 1, 2),
            host=host, axes=axes_of, doc=__doc__ or "")  # fmt: skip
