"""How the next token is chosen: settings as users write them, and as the device reads them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypedDict

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from centella.errors import DTypeError, ShapeError, WeightsError
from centella.tasks.generate.argument_hints import OF_GENERATE
from centella.tensors.arguments import unknown_argument
from centella.weights.model_files import read_json, show


class SamplingArgs(TypedDict, total=False):
    """Keyword arguments of what generates; see `Sampling`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int | None


class Sampling(Struct, frozen=True):
    """How the next token is chosen.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: tokens that are kept, the most likely first; 0: all.
        top_p: the probability that the kept tokens reach together, after top_k; 1: all.
        min_p: least probability of a token, as a part of that of the most likely one.
        repetition_penalty: divides positive logits of tokens that are in the prompt or the text,
            multiplies negative ones.
        frequency_penalty, presence_penalty: taken off logits of tokens in the text, times how
            often they are there, and once.
        seed: 0 to 2^31 - 1; equal seeds give equal tokens; None: another one each time. Sequence
            i of a batch has seed + i, modulo 2^31.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None

    @classmethod
    def from_config(cls, values: Mapping[str, Any], origin: str) -> Self:
        """What a generation_config.json says; temperature 0 where it does not sample.

        Raises:
            WeightsError: a value that cannot be.
        """
        drawn = ("temperature", "top_k", "top_p", "min_p") if values.get("do_sample") else ()
        stated = {n: values[n] for n in (*drawn, "repetition_penalty") if values.get(n) is not None}
        base: dict[str, float] = {"temperature": 1.0} if drawn else {}
        try:
            return cls().with_(origin, {**base, **stated})
        except (ShapeError, DTypeError) as error:
            raise WeightsError(str(error)) from error

    def with_(self, op: str, values: Mapping[str, Any]) -> Self:
        """These settings with others in their place; the first error names `op`.

        Raises:
            ShapeError: a number out of its range.
            DTypeError: what is no number; an unknown name.
        """
        unknown = min(set(values) - set(RANGES), default=None)
        if unknown is not None:
            otherwise = f"sampling takes {', '.join(RANGES)}"
            raise unknown_argument(op, unknown, OF_GENERATE.get(unknown, otherwise))
        checked = {name: _checked(op, name, value) for name, value in values.items()}
        return replace(self, **checked)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken as it is."""
        return not (self.temperature or self.penalised)

    @property
    def penalised(self) -> bool:
        """Whether tokens that have been seen count."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    def numbers(self) -> list[float]:
        """As `ops.sample` reads them."""
        gap = -math.log(self.min_p) if self.min_p > 0 else math.inf
        return [float(self.temperature), float(self.top_k), float(self.top_p), gap,
                float(self.repetition_penalty), float(self.frequency_penalty),
                float(self.presence_penalty)]  # fmt: skip

    def first_seed(self) -> int:
        """Its seed, or a new one, of 31 bits."""
        seed = int.from_bytes(os.urandom(4), "little") if self.seed is None else self.seed
        return seed & 0x7FFFFFFF


class GeneratorConfig(Struct, frozen=True):
    """What a folder says of generation.

    Attributes:
        stop_ids: tokens that end a text.
        sampling: how tokens are chosen where a call says nothing.
        begin_id: the token that a text begins with, where its tokenizer adds none.
    """

    stop_ids: frozenset[int] = frozenset()
    begin_id: int | None = None
    sampling: Sampling = Sampling()

    @classmethod
    def from_folder(cls, folder: Path) -> GeneratorConfig:
        """Read generation_config.json, config.json and tokenizer_config.json.

        Raises:
            WeightsError: a file that is malformed.
        """
        stops: set[int] = set()
        file = folder / "generation_config.json"
        own = read_json(file)
        config = read_json(folder / "config.json")
        for name, source in (("generation_config.json", own), ("config.json", config)):
            stated = source.get("eos_token_id")
            several = stated if isinstance(stated, list) else [] if stated is None else [stated]
            if any(type(i) is not int for i in several):
                raise WeightsError(
                    f"{folder / name}: eos_token_id: expected an id or several, got {show(stated)}"
                )
            stops.update(i for i in several if i >= 0)
        begin = config.get("bos_token_id")
        begin = begin if type(begin) is int and begin >= 0 else None
        return cls(frozenset(stops), begin, Sampling.from_config(own, str(file)))


def _checked(op: str, name: str, value: Any) -> float | None:
    """A setting as a number of Python; None for a seed that is None."""
    if name == "seed" and value is None:
        return None
    number = value.item() if isinstance(value, np.integer | np.floating) else value
    whole = name in ("top_k", "seed")
    fits = isinstance(number, int | float) and not isinstance(number, bool)
    if not fits or (whole and not (math.isfinite(number) and number == int(number))):
        kind = "a whole number" if whole else "a number"
        raise DTypeError(f"{op}: {name}: expected {kind}, got {show(number)}")
    low, high, text = RANGES[name]
    if not low <= number <= high:
        raise ShapeError(f"{op}: {name}: expected {text}, got {number}")
    return int(number) if whole else number


# Least and most of each number, and how an error says so.
RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 1e4, "0 to 10,000"),
    "top_k": (0, 1 << 31, "0 or more"),
    "top_p": (1e-6, 1.0, "above 0 and at most 1"),
    "min_p": (0.0, 1.0, "0 to 1"),
    "repetition_penalty": (1e-3, 1e3, "above 0"),
    "frequency_penalty": (-100.0, 100.0, "-100 to 100"),
    "presence_penalty": (-100.0, 100.0, "-100 to 100"),
    "seed": (0, 0x7FFFFFFF, "0 to 2,147,483,647"),
}
