"""How the next token is chosen: settings as users write them, and as the device reads them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Self, TypedDict

from msgspec import Struct
from msgspec.structs import replace

from centella.errors import DTypeError, ShapeError, WeightsError
from centella.weights.model_files import show


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
        seed: equal seeds give equal tokens; None: another one each time. Sequence i of a batch
            has seed + i.
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
        """What a generation_config.json says; greedy where it does not sample.

        Raises:
            WeightsError: a value that cannot be.
        """
        if not values.get("do_sample", False):
            return cls()
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        stated = {n: values[n] for n in names if values.get(n) is not None}
        try:
            return cls().with_(origin, {"temperature": 1.0, **stated})
        except (ShapeError, DTypeError) as error:
            raise WeightsError(str(error)) from error

    def with_(self, op: str, values: Mapping[str, Any]) -> Self:
        """These settings with others in their place; the first error names `op`.

        Raises:
            ShapeError: a number out of its range.
            DTypeError: what is no number; TypeError: an unknown name.
        """
        unknown = set(values) - set(RANGES) - {"seed"}
        if unknown:
            raise TypeError(
                f"{op}: unexpected argument {min(unknown)!r}; sampling takes "
                f"{', '.join((*RANGES, 'seed'))}"
            )
        for name, value in values.items():
            whole = name in ("top_k", "seed")
            if name == "seed" and value is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or (whole and value != int(value)):
                kind = "a whole number" if whole else "a number"
                raise DTypeError(f"{op}: {name}: expected {kind}, got {show(value)}")
            low, high, text = RANGES.get(name, (-math.inf, math.inf, ""))
            if not low <= value <= high:
                raise ShapeError(f"{op}: {name}: expected {text}, got {value}")
        return replace(self, **values)

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


# Least and most of each number, and how an error says so.
RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 1e4, "0 to 10,000"),
    "top_k": (0, 1 << 31, "0 or more"),
    "top_p": (1e-6, 1.0, "above 0 and at most 1"),
    "min_p": (0.0, 1.0, "0 to 1"),
    "repetition_penalty": (1e-3, 1e3, "above 0"),
    "frequency_penalty": (-100.0, 100.0, "-100 to 100"),
    "presence_penalty": (-100.0, 100.0, "-100 to 100"),
}
