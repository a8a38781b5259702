"""Rotary frequencies as config.json states them: the plain ones and those scaled for long texts.

Angle of pair j at position p: p f_j, with f_j = theta^(-2 j / dim) before scaling (Su et al. 2021).

    linear    f / factor (Chen et al. 2023)
    dynamic   f up to `max_position_embeddings`; a larger theta beyond (NTK-aware), not done here
    llama3    long wavelengths divided by factor, short ones kept, a ramp between (Llama 3.1)
    yarn      the same with a ramp over pairs; cos and sin grow with factor (Peng et al. 2023)
    longrope  a divisor for each pair, from one of two lists by length (Ding et al. 2024)
    divided   a divisor for each pair, as GGUF files have Llama 3's scaling
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeGuard

import numpy as np
from numpy.typing import NDArray

from centella.errors import WeightsError
from centella.weights.model_files import show

Frequencies = NDArray[np.float64]
_LENGTH = "original_max_position_embeddings"
# What each type reads, beside rope_theta.
READ: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale",
             "mscale_all_dim"),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
    "divided": ("divisors",),
}  # fmt: skip
KINDS = tuple(READ)
NEUTRAL = frozenset([
    "rope_type", "type", "rope_theta",  # are read for every type
    _LENGTH,  # a length alone scales nothing
    "finetuned",  # how the model was trained
    "mrope_section", "mrope_interleaved",  # share columns among axes of images; a text has one
])  # fmt: skip
# Factors that change nothing where they are 1, for types that do not read them.
ONES = frozenset(["factor", "attention_factor", "attn_factor", "extrapolation_factor",
                  "partial_rotary_factor"])  # fmt: skip
WIDEST = 1e30  # of a number, and 1 / WIDEST the smallest: what they give stays finite


class Rope:
    """One rotary embedding of a model.

    Args:
        values: `rope_parameters` of config.json: rope_type, rope_theta and what the type needs.
        dim: columns of a head that turn, even.
        positions: `max_position_embeddings` of the model.
        origin: begins the text of an error.

    Raises:
        WeightsError: a type that is not among `KINDS`, a number that is missing or not positive, or
            a value that the type does not read.
    """

    def __init__(self, values: Mapping[str, Any], dim: int, positions: int, origin: str) -> None:
        self.origin = origin
        self._values = dict(values)
        self.dim = dim
        self.positions = positions
        self.kind: str = self._values.get("rope_type") or self._values.get("type") or "default"
        if self.kind not in KINDS:
            raise WeightsError(
                f"{origin}: rope_type: expected {', '.join(KINDS)}, got {show(self.kind)}"
            )
        for name, value in self._values.items():
            known = name in NEUTRAL or name in READ[self.kind] or (name in ONES and value == 1)
            if value is not None and not known:
                raise WeightsError(
                    f"{origin}: {show(name)}: rope_type {self.kind} does not read this value, "
                    f"which is {show(value)}; without it the model might be another"
                )
        if dim < 2 or dim % 2:
            raise WeightsError(f"{origin}: rotary columns: expected an even number, got {dim}")
        if self.kind == "longrope":
            self._divisors("long_factor")
        self.tables(1)  # refuses now what it lacks

    def tables(
        self, capacity: int, length: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """cos and sin f32 [capacity, dim / 2], computed in float64.

        Args:
            length: tokens of the text, which `longrope` depends on; None: `capacity`.
        """
        frequencies, growth = self._scaled(capacity if length is None else length)
        angles = np.arange(capacity, dtype=np.float64)[:, None] * frequencies
        cos, sin = np.cos(angles) * growth, np.sin(angles) * growth
        return cos.astype(np.float32), sin.astype(np.float32)

    def expect_fixed(self) -> None:
        """Refuse frequencies that depend on the length of the text, as of its batch's padding.

        Raises:
            WeightsError: `longrope`.
        """
        if self.kind == "longrope":
            known = ", ".join(kind for kind in KINDS if kind != "longrope")
            raise WeightsError(
                f"{self.origin}: rope_type: expected {known} to embed with, got {show(self.kind)}"
            )

    @property
    def reach(self) -> int | None:
        """Tokens of the longest text with `longrope`'s short divisors; None: of another type."""
        return int(self._number(_LENGTH, self.positions)) if self.kind == "longrope" else None

    def _scaled(self, length: int) -> tuple[Frequencies, float]:
        """Frequencies, and what cos and sin are multiplied by."""
        theta = self._number("rope_theta", 10000.0)
        plain = theta ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        if self.kind == "dynamic":
            self._number("factor")  # which no text within the model's positions depends on
        if self.kind in ("default", "dynamic"):
            return plain, 1.0
        over = 1.0 if self.kind == "longrope" else 0.0  # of which the logarithm divides
        trained = self._number(_LENGTH, self.positions, over)
        if self.kind == "divided":
            return plain / self._divisors("divisors"), 1.0
        if self.kind == "longrope":
            return self._longrope(plain, length, trained)
        stated = self._values.get(_LENGTH) is not None
        default = self.positions / trained if self.kind == "yarn" and stated else None
        factor = self._number("factor", default)
        if self.kind == "linear":
            return plain / factor, 1.0
        if self.kind == "llama3":
            return self._llama3(plain, factor, trained), 1.0
        return self._yarn(plain, factor, trained), self._growth(factor)

    def _llama3(self, plain: Frequencies, factor: float, trained: float) -> Frequencies:
        low = self._number("low_freq_factor")
        high = self._number("high_freq_factor", over=low)
        turns = trained * plain / (2 * math.pi)  # within the trained length
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        scaled: Frequencies = plain / factor * (1 - kept) + plain * kept
        return scaled

    def _yarn(self, plain: Frequencies, factor: float, trained: float) -> Frequencies:
        theta = self._number("rope_theta", 10000.0, over=1.0)

        def pair(turns: float) -> float:
            """The pair that turns so often within the trained length."""
            return self.dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair(self._number("beta_fast", 32.0)), pair(self._number("beta_slow", 1.0))
        truncate = self._values.get("truncate", True)
        if type(truncate) is not bool:
            self._fail("truncate", "true or false", truncate)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = (np.arange(self.dim // 2) - low) / max(high - low, 0.001)
        kept = 1 - np.clip(ramp, 0.0, 1.0)
        scaled: Frequencies = plain / factor * (1 - kept) + plain * kept
        return scaled

    def _growth(self, factor: float) -> float:
        def of(scale: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

        if self._values.get("attention_factor") is not None:
            return self._number("attention_factor")
        both = self._values.get("mscale"), self._values.get("mscale_all_dim")
        if all(both):
            return of(self._number("mscale")) / of(self._number("mscale_all_dim"))
        return of(1.0)

    def _longrope(
        self, plain: Frequencies, length: int, trained: float
    ) -> tuple[Frequencies, float]:
        divisors = self._divisors("long_factor" if length > trained else "short_factor")
        factor = self._number("factor", self.positions / trained)
        default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
        return plain / divisors, self._number("attention_factor", default)

    def _divisors(self, name: str) -> Frequencies:
        """A positive number for each pair."""
        divisors = self._values.get(name)
        fits = isinstance(divisors, list) and len(divisors) == self.dim // 2
        if not fits or not all(_is_number(d) for d in divisors or ()):
            self._fail(name, f"{self.dim // 2} positive numbers", divisors)
        return np.array(divisors, np.float64)

    def _number(self, name: str, default: float | None = None, over: float = 0.0) -> float:
        value = self._values.get(name)
        value = default if value is None else value
        if not _is_number(value) or value <= over:
            wanted = f"a number over {over:g}" if over else "a positive number"
            self._fail(name, f"{wanted} for rope_type {self.kind}", value)
        return float(value)

    def _fail(self, name: str, expected: str, value: object) -> NoReturn:
        raise WeightsError(f"{self.origin}: {name}: expected {expected}, got {show(value)}")


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 1 / WIDEST <= value <= WIDEST
