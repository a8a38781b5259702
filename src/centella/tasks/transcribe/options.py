"""What a transcription may be told, and what a model's folder says of it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from msgspec import Struct
from msgspec.structs import fields, replace

from centella.audio.regions import SpeechDetector, VadModel
from centella.audio.silero import SileroModel
from centella.errors import DTypeError, ShapeError, WeightsError
from centella.tasks.generate.argument_hints import OF_TRANSCRIBE
from centella.tasks.transcribe.languages import CODES
from centella.tasks.transcribe.rules import LONGEST, Vocabulary
from centella.tasks.transcribe.windows import Thresholds
from centella.tensors.arguments import flag, one_of, unknown_argument, whole
from centella.weights.model_files import read_json, show

TASKS = ("transcribe", "translate")
GENERATION = "generation_config.json"
TIMES = ("none", "segment", "word")
DETECTORS = ("auto", "silero", "energy", "off")
VAD_MODEL = "CENTELLA_VAD_MODEL"  # environment variable: the file if no argument names one
MOST_WINDOWS = 256  # at once
ENGLISH_SIZE = 51864  # tokens of released models of English alone; theirs have those of languages
SHOWN = 12  # codes of languages that an error names
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
Regions = Sequence[tuple[float, float]]


class TranscribeArgs(TypedDict, total=False):
    """Keyword arguments of what transcribes; see `Options`."""

    language: str | None
    task: str
    timestamps: str
    prompt: str | None
    hotwords: str | None
    condition_on_previous_text: bool
    temperature: float | Sequence[float]
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    no_repeat_ngram: int
    max_repeats: int
    max_new_tokens: int | None
    seed: int
    batch: int | None
    beam: int
    vad: str
    vad_model: VadModel | None
    regions: Regions | None


class Options(Struct, frozen=True):
    """Options of a transcription; the defaults are those of the published implementation.

    Attributes:
        language: a code ("de") or an English name ("German"); None: the model detects it in the
            first window.
        task: "transcribe", or "translate" to English.
        timestamps: "segment", "word" (segments with the times of their words) or "none".
        prompt: text that precedes the first window, to set names, spelling and style.
        hotwords: words that precede each window's prompt.
        condition_on_previous_text: whether the previous text is part of a window's prompt. Not in
            batches.
        temperature: 0 takes the most likely token. Of several temperatures the next one is tried if
            a text fails a threshold.
        compression_ratio_threshold, logprob_threshold, no_speech_threshold: see `Thresholds`.
        no_repeat_ngram: length of n-grams that may not occur twice in a window, 2 to 8; 0: no
            limit.
        max_repeats: a window's text ends when a sequence of up to 8 tokens has occurred this many
            times in a row; 0: no limit.
        max_new_tokens: most tokens of a window; None: half of the model's positions.
        seed: of sampling; equal seeds give equal texts.
        batch: windows at once. 1: one after the other, each from the last timestamp of the previous
            one. None: 8 for audio that is longer than a window and has regions, else 1.
        beam: number of beams at temperature 0; 1: greedy decoding.
        vad: voice activity detection: "silero", by its network; "energy", by energy and spectrum;
            "auto": the network if a file of it is named, else "energy"; "off": everything is
            transcribed.
        vad_model: Silero's network or the path of its ONNX file; None: the file that the
            environment variable `CENTELLA_VAD_MODEL` names, if any.
        regions: (start, end) of speech in seconds, in order; the rest is not transcribed.
    """

    language: str | None = None
    task: str = "transcribe"
    timestamps: str = "segment"
    prompt: str | None = None
    hotwords: str | None = None
    condition_on_previous_text: bool = True
    temperature: tuple[float, ...] = TEMPERATURES
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    no_repeat_ngram: int = 0
    max_repeats: int = 0
    max_new_tokens: int | None = None
    seed: int = 0
    batch: int | None = None
    beam: int = 1
    vad: str = "auto"
    vad_model: VadModel | None = None
    regions: tuple[tuple[float, float], ...] | None = None

    @property
    def thresholds(self) -> Thresholds:
        """When a text is not believed."""
        return Thresholds(
            self.compression_ratio_threshold, self.logprob_threshold, self.no_speech_threshold
        )

    def detector(self) -> SpeechDetector | None:
        """The detector of the regions of speech; None: everything is transcribed."""
        return None if self.vad == "off" else SpeechDetector(vad_model=self.vad_model)

    @classmethod
    def of(cls, op: str, values: Mapping[str, Any], vocabulary: Vocabulary) -> Options:
        """The options that arguments set, each checked.

        Raises:
            ShapeError: a value out of its range, or a language or task that the model has not.
            DTypeError: a value of another type; an unknown name.
            WeightsError, MissingExtraError: as `vad_network`.
        """
        known = {field.name for field in fields(cls)}
        unknown = min(set(values) - known, default=None)
        if unknown is not None:
            otherwise = f"expected {', '.join(sorted(known))}"
            raise unknown_argument(op, unknown, OF_TRANSCRIBE.get(unknown, otherwise))
        options = cls()
        for name, value in values.items():
            checked = _CHECKS.get(name, _number)(op, name, value)
            options = replace(options, **{name: checked})
        for name, names in _NAMED.items():
            one_of(op, name, getattr(options, name), names)
        options = replace(options, vad_model=vad_network(op, options.vad, options.vad_model))
        if options.task != "transcribe" and options.task not in vocabulary.tasks:
            raise ShapeError(f"{op}: task: expected transcribe, got {options.task}; {_ENGLISH}")
        if options.language is not None:
            options = replace(options, language=_language(op, options.language, vocabulary))
        return options


def vad_network(op: str, vad: str, named: VadModel | None) -> SileroModel | None:
    """Silero's network, opened, if it is to find the speech; else None.

    Args:
        vad: one of `DETECTORS`.
        named: the network or its file; None: the file that `CENTELLA_VAD_MODEL` names.

    Raises:
        ShapeError: another `vad`; a file that `vad` does not use; no file if `vad` is "silero".
        WeightsError, DTypeError, MissingExtraError: as `SileroModel`.
    """
    one_of(op, "vad", vad, DETECTORS)
    if vad in ("energy", "off"):
        if named is not None:
            raise ShapeError(f"{op}: vad_model: expected vad of auto or silero with it, got {vad}")
        return None
    file = named if named is not None else os.environ.get(VAD_MODEL) or None
    if file is None:
        if vad == "silero":
            raise ShapeError(
                f"{op}: vad: silero needs its ONNX file, which centella does not bring: expected "
                f"vad_model=PATH, --vad-model PATH or {VAD_MODEL}=PATH, got none"
            )
        return None
    return file if isinstance(file, SileroModel) else SileroModel(file)


_NAMED = {"task": TASKS, "timestamps": TIMES, "vad": DETECTORS}
_ENGLISH = "the model has English alone"


def _language(op: str, language: str, vocabulary: Vocabulary) -> str | None:
    named = language.lower().strip("<|> ")
    code = CODES.get(named, named)
    if not vocabulary.languages:
        if code != "en":
            raise ShapeError(f"{op}: language: expected en, got {show(language)}; {_ENGLISH}")
        return None
    if code not in vocabulary.languages:
        several = list(vocabulary.languages)
        some = ", ".join(several[:SHOWN]) + (f" ({len(several)} in all)" * (len(several) > SHOWN))
        raise ShapeError(
            f"{op}: language: expected an English name or a code of {some}; got {show(language)}"
        )
    return code


def _text(op: str, name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        what = ", ".join(_NAMED[name]) if name in _NAMED else "text"
        raise DTypeError(f"{op}: {name}: expected {what}, got {show(value)}")
    return value


def _as_it_is(op: str, name: str, value: Any) -> Any:
    return value  # `vad_network` checks it


def _number(op: str, name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise DTypeError(f"{op}: {name}: expected a number or None, got {show(value)}")
    return float(value)


def _whole(least: int, most: int, off: bool = False) -> Callable[[str, str, Any], int]:
    """A check of a whole number; `off`: 0 is one, too."""

    def check(op: str, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise DTypeError(f"{op}: {name}: expected a whole number, got {show(value)}")
        if not (least <= value <= most or (value == 0 and off)):
            also = "0, or " if off else ""
            raise ShapeError(f"{op}: {name}: expected {also}{least:,} to {most:,}, got {value:,}")
        return value

    return check


def _count(op: str, name: str, value: Any) -> int | None:
    return None if value is None else whole(op, name, value, 1)


def _windows(op: str, name: str, value: Any) -> int | None:
    return None if value is None else _whole(1, MOST_WINDOWS)(op, name, value)


def _temperatures(op: str, name: str, value: Any) -> tuple[float, ...]:
    several = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    numbers = tuple(_number(op, name, v) for v in several)
    if not numbers or any(t is None or not 0 <= t <= 100 for t in numbers):
        raise ShapeError(f"{op}: {name}: expected numbers of 0 to 100, got {show(value)}")
    return tuple(t for t in numbers if t is not None)


def _regions(op: str, name: str, value: Any) -> tuple[tuple[float, float], ...] | None:
    if value is None:
        return None
    try:
        regions = tuple((float(start), float(end)) for start, end in value)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"{op}: {name}: expected pairs of seconds, got {show(value)}") from error
    ends = [t for region in regions for t in region]
    if any(not 0 <= a <= b for a, b in itertools.pairwise(ends)):
        raise ShapeError(f"{op}: {name}: expected times in order, got {show(value)}")
    return regions


_CHECKS: dict[str, Any] = {
    **dict.fromkeys(("language", "task", "timestamps", "prompt", "hotwords", "vad"), _text),
    "condition_on_previous_text": flag, "temperature": _temperatures, "regions": _regions,
    "no_repeat_ngram": _whole(2, LONGEST, off=True), "max_repeats": _whole(2, 1000, off=True),
    "seed": _whole(0, 0x7FFFFFFF), "batch": _windows, "beam": _whole(1, 16),
    "max_new_tokens": _count, "vad_model": _as_it_is,
}  # fmt: skip


class SpeechConfig(Struct, frozen=True):
    """What a folder says of transcription.

    Attributes:
        vocabulary: the special tokens.
        alignment_heads: (layer, head) of those that follow the speech; empty: not known.
    """

    vocabulary: Vocabulary
    alignment_heads: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_folder(cls, folder: Path, size: int, named: Mapping[str, int]) -> SpeechConfig:
        """Read generation_config.json and config.json.

        Args:
            size: of the vocabulary; named: ids of special tokens, as the tokenizer names them.

        Raises:
            WeightsError: a file that is malformed, or a token that nothing names.
        """
        file = folder / GENERATION
        values = {**read_json(folder / "config.json"), **read_json(file)}

        def token(field: str, *names: str) -> int:
            stated = values.get(field)
            number = stated if type(stated) is int else next(
                (named[f"<|{n}|>"] for n in names if f"<|{n}|>" in named), None)  # fmt: skip
            if number is None or not 0 <= number < size:
                raise WeightsError(
                    f"{file}: {field}: expected a token id below {size}, got {show(number)}"
                )
            return int(number)

        no_timestamps = token("no_timestamps_token_id", "notimestamps")
        languages = _table(file, values, "lang_to_id", size)
        if not languages and values.get("is_multilingual", size != ENGLISH_SIZE):
            codes = {n: i for n, i in named.items() if re.fullmatch(r"<\|[a-z]{2,3}\|>", n)}
            languages = {name.strip("<|>"): i for name, i in codes.items()}
        tasks = _table(file, values, "task_to_id", size) if languages else {}
        tasks = tasks or {n: named[f"<|{n}|>"] for n in TASKS if languages and f"<|{n}|>" in named}
        latest = values.get("max_initial_timestamp_index", 50)
        vocabulary = Vocabulary(
            size=size, end=token("eos_token_id", "endoftext"), no_timestamps=no_timestamps,
            start=token("decoder_start_token_id", "startoftranscript"),
            previous=token("prev_sot_token_id", "startofprev"),
            no_speech=no_timestamps - 1, languages=languages, tasks=tasks,
            suppressed=_ids(file, values, "suppress_tokens"),
            at_begin=_ids(file, values, "begin_suppress_tokens"),
            latest=latest if type(latest) is int else None,
        )  # fmt: skip
        return cls(vocabulary, _heads(file, values))


def _table(file: Path, values: Mapping[str, Any], field: str, size: int) -> dict[str, int]:
    table = values.get(field) or {}
    fits = isinstance(table, dict) and all(type(i) is int and 0 <= i < size for i in table.values())
    if not fits:
        raise WeightsError(f"{file}: {field}: expected names and token ids, got {show(table)}")
    return {str(name).strip("<|>"): i for name, i in table.items()}


def _ids(file: Path, values: Mapping[str, Any], field: str) -> tuple[int, ...]:
    ids = values.get(field) or []
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise WeightsError(f"{file}: {field}: expected a list of token ids, got {show(ids)}")
    return tuple(ids)


def _heads(file: Path, values: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    heads = values.get("alignment_heads") or []
    sizes = values.get("decoder_layers", 0), values.get("decoder_attention_heads", 0)
    try:
        pairs = sorted((int(layer), int(head)) for layer, head in heads)
        if any(not 0 <= i < n for pair in pairs for i, n in zip(pair, sizes, strict=True)):
            raise ValueError
    except (TypeError, ValueError) as error:
        raise WeightsError(
            f"{file}: alignment_heads: expected pairs of a layer and a head, got {show(heads)}"
        ) from error
    return tuple(pairs)
