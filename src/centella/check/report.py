"""What a check found, as records and as a card to paste into a report."""

from __future__ import annotations

import platform
from importlib import metadata
from textwrap import wrap
from typing import Any

import numpy as np
from msgspec import Struct, to_builtins

from centella.backends.base import About
from centella.host.version import __version__
from centella.runtime.device import Device

PACKAGES = ("wgpu", "cuda-bindings", "torch", "transformers")  # whose version may matter


class Failure(Struct, frozen=True):
    """A case that an operation got wrong, or that could not be run.

    Attributes:
        op, dtype: of the row of cases; shapes: of the inputs; case: with layouts and attributes.
        index: of the element that is furthest off, or the first that is not equal; expected, got:
            its values. None and "" where the case raised.
        why: the difference, or the error.
    """

    op: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    case: str
    why: str
    index: tuple[int, ...] | None = None
    expected: str = ""
    got: str = ""

    def __str__(self) -> str:
        what = [self.op, self.dtype, *(str(list(shape)) for shape in self.shapes)]
        return f"{' '.join(filter(None, what))}: {self.why}"


class Rate(Struct, frozen=True):
    """One measurement.

    Attributes:
        what: was measured; value: in `unit`.
        note: on what; share: of the copy bandwidth measured here, for what moves bytes.
    """

    what: str
    value: float
    unit: str
    note: str
    share: float | None = None


class Layer(Struct, frozen=True):
    """The output of one module of a model beside that of another implementation.

    Attributes:
        path: as in `named_modules`; "" for the whole model. Of a speech model also "log_mel", and
            "logits, by step": of one token after the other.
        shape: of the output; dtype: that it was computed in.
        error: sum((got - expected)^2) / sum(expected^2), None where that is no number; limit: what
            it may be.
        worst: the largest difference of an element, over the root mean square of what is expected.
        why: where it differs; "" where it does not.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    error: float | None
    limit: float
    why: str = ""
    worst: float | None = None


class Tokens(Struct, frozen=True):
    """A greedy continuation beside that of another implementation.

    Attributes:
        equal: tokens before the first that differs; of: how many there are.
        expected, got: that token, -1 where all are equal; apart: by how much the other's logit is
            lower in the implementation that it is compared with.
        why: where it is wrong; "" where it is right, or two tokens are about as likely.
    """

    equal: int
    of: int
    expected: int = -1
    got: int = -1
    apart: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        if self.equal == self.of:
            return f"{self.of} of {self.of} equal"
        said = self.why or (
            f"then {self.got} for {self.expected}, which is about as likely "
            f"(its logit is lower by {self.apart:.2g})"
        )
        return f"{self.equal} of {self.of} equal; {said}"


class Quantized(Struct, frozen=True):
    """A model with quantised weights beside itself without, on one device.

    Attributes:
        format: of the weights.
        layers: path, and sum((got - expected)^2) / sum(expected^2) of the states there.
        logits: the same of the logits; divergence: mean of KL(p || p quantised) over positions.
        same_top: part of the positions with the same likeliest token.
        equal: tokens of the greedy continuation before the first that differs; of: how many.
    """

    format: str
    layers: tuple[tuple[str, float], ...]
    logits: float
    divergence: float
    same_top: float
    equal: int
    of: int

    def __str__(self) -> str:
        path, worst = max(self.layers, key=lambda layer: layer[1])
        return (
            f"{self.format}: squared error {self.logits:.2g} of the squares of logits, at most "
            f"{worst:.2g} of states ({path}); KL {self.divergence:.2g}; same likeliest token in "
            f"{self.same_top:.0%}; {self.equal} of {self.of} tokens equal"
        )


class Heading(Struct, frozen=True):
    """What every report says first.

    Attributes:
        device: its name; details: as `device.describe()` says.
        versions: of this library, Python, NumPy, and packages that are installed.
        platform: the operating system and machine.
        seconds: that the check took.
    """

    device: str
    details: About
    versions: dict[str, str]
    platform: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        plain: dict[str, Any] = to_builtins(self)
        return plain

    def head(self) -> list[str]:
        """The first lines of a card."""
        details = self.details
        driver = ", ".join(str(details[k]) for k in ("api", "driver", "arch") if details.get(k))
        named = f"{details.get('name', '')}; {driver}" if driver else str(details.get("name", ""))
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return [
            f"device    {self.device}",
            f"adapter   {named}",
            *wrap(f"versions  {versions}", 100, subsequent_indent=" " * 10),
            f"platform  {self.platform}",
        ]


class DeviceReport(Heading, frozen=True):
    """What `check_device` found.

    Attributes:
        passed, failed: numbers of cases; left_out: of those for which there was no time.
        failures: one for each operation and dtype with a wrong case: the first; "rates" where
            these could not be measured.
        rates: none where the numbers were wrong.
    """

    passed: int
    failed: int
    left_out: int
    failures: tuple[Failure, ...]
    rates: tuple[Rate, ...]

    @property
    def ok(self) -> bool:
        """Whether every case was right."""
        return not self.failures

    def card(self) -> str:
        """Text to paste into a report."""
        left = f", {self.left_out} left out for time" if self.left_out else ""
        lines = [*self.head(), f"cases     {self.passed} passed, {self.failed} failed{left}"]
        lines += [f"{'first' if i == 0 else 'also':<9} {f}" for i, f in enumerate(self.failures)]
        for rate in self.rates:
            share = "" if rate.share is None else f", {rate.share:.0%} of the copy"
            lines.append(f"{rate.what:<22} {rate.value:>9.4g} {rate.unit}  ({rate.note}{share})")
        return "\n".join([*lines, f"took      {self.seconds:.0f} s"])


class ModelReport(Heading, frozen=True):
    """What `check_model` found.

    Attributes:
        folder: of the checkpoint; against: what its layers were compared with.
        layers: in the order in which the model finished them, the whole model last.
        tokens: of a decoder its continuation, of a speech model its transcript.
        quantized: what quantising changes, if it was asked.
    """

    folder: str
    against: str
    layers: tuple[Layer, ...]
    tokens: Tokens | None = None
    quantized: Quantized | None = None

    @property
    def first(self) -> Layer | None:
        """The first layer that differs."""
        return next((layer for layer in self.layers if layer.why), None)

    @property
    def ok(self) -> bool:
        """Whether every layer was right, and the continuation."""
        return self.first is None and not (self.tokens and self.tokens.why)

    def card(self) -> str:
        """Text to paste into a report."""
        wrong = sum(bool(layer.why) for layer in self.layers)
        lines = [
            *self.head(),
            f"model     {self.folder}",
            f"against   {self.against}",
            f"layers    {len(self.layers) - wrong} passed, {wrong} failed",
        ]
        if (first := self.first) is not None:
            where = first.path or "the whole model"
            lines.append(f"first     {where} {first.dtype} {list(first.shape)}: {first.why}")
        else:
            errors = [(e / x.limit, e, x) for x in self.layers if (e := x.error) is not None]
            _, error, largest = max(errors, key=lambda error: error[0])
            where = largest.path or "the whole model"
            lines.append(
                f"largest   squared error {error:.2g} of the squares, in {where} (at most "
                f"{largest.limit:g})"
            )
        if self.tokens is not None:
            wide = max(len(layer.path) for layer in self.layers)
            lines += [f"tokens    {self.tokens}", *(_line(layer, wide) for layer in self.layers)]
        lines += [] if self.quantized is None else [f"quantized {self.quantized}"]
        return "\n".join([*lines, f"took      {self.seconds:.0f} s"])


def _line(layer: Layer, wide: int) -> str:
    """A layer's figures, of a model with few enough to list."""
    error, worst = ("no number" if n is None else f"{n:.2g}" for n in (layer.error, layer.worst))
    mark = "  differs" if layer.why else ""
    return f"  {layer.path or 'logits':<{wide}} squared error {error:<8} largest {worst}{mark}"


def device_fields(device: Device, seconds: float) -> dict[str, Any]:
    """The fields of `Heading`: a device, versions, seconds."""
    versions = {
        "centella": __version__,
        "Python": platform.python_version(),
        "NumPy": np.__version__,
    }
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": device.name,
        "details": device.describe(),
        "versions": versions,
        "platform": platform.platform(),
        "seconds": seconds,
    }
