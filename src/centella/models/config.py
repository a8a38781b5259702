"""The config.json of a model folder: the fields that an architecture names, each checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from msgspec import Struct
from msgspec.structs import fields

from centella.errors import WeightsError
from centella.weights.model_files import show

# The activation that `nn.Linear` has, by the name that transformers gives it.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",  # the same, written otherwise
    "quick_gelu": "gelu_quick",
    "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh", "swish": "silu", "silu": "silu",
}  # fmt: skip

LARGEST = 2**31 - 1  # of a whole number
# Of whole numbers that lists are made of.
MOST = {"num_hidden_layers": 10_000, "head_dim": 65_536, "encoder_layers": 10_000,
        "decoder_layers": 10_000}  # fmt: skip
WIDEST = 1e30  # of other numbers, whose products stay finite in float32


class ModelConfig(Struct, frozen=True):
    """The part of a config.json that an architecture depends on; names as there.

    A subclass adds fields; one with a default may be missing in the file.

    Attributes:
        supported: the values that the architecture has, by field; another field is a number over 0.
        multiples: fields, and those that they are multiples of.
        layer_tensors: tensors that a layer has in a checkpoint.
        derived: fields that are computed from others, and not checked.
        zero: fields that may be 0.
    """

    supported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    multiples: ClassVar[tuple[tuple[str, str], ...]] = ()
    layer_tensors: ClassVar[int] = 1
    derived: ClassVar[frozenset[str]] = frozenset()
    zero: ClassVar[frozenset[str]] = frozenset()

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], origin: str = "config.json") -> Self:
        """The config that a config.json holds.

        Raises:
            WeightsError: a value is missing, or one that this model does not have.
        """
        return cls._checked(values, {}, origin)

    @classmethod
    def _checked(cls, values: Mapping[str, Any], spelled: Mapping[str, str], origin: str) -> Self:
        """As `from_dict`; `spelled` has the file's names of fields, for errors."""
        own = [f for f in fields(cls) if f.name not in cls.derived]
        name_of = {f.name: spelled.get(f.name, f.name) for f in own}
        missing = [name_of[f.name] for f in own if f.required and f.name not in values]
        if missing:
            raise WeightsError(f"{origin}: missing: {', '.join(missing)}")
        config = cls(**{f.name: values[f.name] for f in own if f.name in values})
        for f in own:
            value, known = getattr(config, f.name), cls.supported.get(f.name)
            zero = f.name in cls.zero
            if known:
                fits = value in known
            else:
                fits = type(value) is f.type and (0 < value < math.inf or (zero and value == 0))
            if not fits:
                number = f"{f.type.__name__} {'0 or more' if zero else 'over 0'}"
                wanted = ", ".join(map(str, known)) if known else number
                raise WeightsError(
                    f"{origin}: {name_of[f.name]}: expected {wanted}, got {show(value)}"
                )
        for name, divisor in cls.multiples:
            size, unit = getattr(config, name), getattr(config, divisor)
            if size % unit:
                raise WeightsError(
                    f"{origin}: {name_of[name]}: expected a multiple of {unit} "
                    f"({name_of[divisor]}), got {size}"
                )
        return config

    def sizes(self) -> dict[str, int]:
        """The whole numbers, by field, that `check_sizes` compares with the tensors."""
        return {f.name: getattr(self, f.name) for f in fields(type(self)) if f.type is int}

    def tensors_of_layer(self) -> int:
        """Tensors that a layer has in a checkpoint."""
        return self.layer_tensors

    def check_sizes(self, checkpoint: Mapping[str, Any], file: str) -> None:
        """Refuse numbers that the tensors cannot have, before a model of that size is built.

        Each whole number but that of the layers is at most the largest extent of a tensor.

        Raises:
            WeightsError: a number is larger than any extent, or there are more layers than tensors.
        """
        largest = max((max(t.shape, default=1) for t in checkpoint.values()), default=0)
        for name, size in self.sizes().items():
            if name != "num_hidden_layers" and size > largest:
                raise WeightsError(
                    f"{file}: {name}: expected at most {largest}, the largest extent of a tensor "
                    f"of the checkpoint, got {show(size)}"
                )
        of_layer = self.tensors_of_layer()
        layers = len(checkpoint) // of_layer
        if self.num_hidden_layers > layers:
            raise WeightsError(
                f"{file}: num_hidden_layers: expected at most {layers}, for {len(checkpoint)} "
                f"tensors in the checkpoint and {of_layer} in a layer, got "
                f"{show(self.num_hidden_layers)}"
            )


class Fields:
    """Reads fields of a config.json, each checked, and remembers which, to tell one left over.

    Args:
        neutral: fields that change nothing, whatever they say.
    """

    def __init__(self, values: Mapping[str, Any], origin: str, neutral: Iterable[str]) -> None:
        self.values: Mapping[str, Any] = values
        self.origin: str = origin
        self._read: set[str] = set(neutral)

    def get(self, name: str, default: Any = None) -> Any:
        """A value, or the default where it is missing or null."""
        self._read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def skip(self, name: str) -> int:
        """A field without effect here."""
        self._read.add(name)
        return 0

    def table(self, name: str) -> dict[str, Any]:
        """An object; an empty one where it is missing."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            self.fail(name, "an object", value)
        return dict(value)

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number within bounds."""
        value, most = self.get(name, default), MOST.get(name, LARGEST)
        if type(value) is not int or value < least:
            self.fail(name, "a whole number over 0" if least else "a whole number", value)
        if value > most:
            self.fail(name, f"at most {most}", value)
        return int(value)

    def number(self, name: str, default: float) -> float:
        """A number whose products stay finite."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 <= value <= WIDEST:
            self.fail(name, f"a number, 0 or more and up to {WIDEST}", value)
        return float(value)

    def divisor(self, name: str, default: float) -> float:
        """A number that others are divided by."""
        value = self.number(name, default)
        if value < 1 / WIDEST:
            self.fail(name, "a number over 0", value)
        return value

    def flag(self, name: str) -> bool:
        """True or false; false where it is missing."""
        value = self.get(name, False)
        if type(value) is not bool:
            self.fail(name, "true or false", value)
        return bool(value)

    def fail(self, name: str, expected: str, value: Any) -> None:
        """Raise what names the field."""
        raise WeightsError(f"{self.origin}: {name}: expected {expected}, got {show(value)}")

    def expect_all_read(self) -> None:
        """Refuse a field that is set and that nothing here reads: it would change the model."""
        left = {
            n: v for n, v in self.values.items() if n not in self._read and v not in (None, False)
        }
        if left:
            name = min(left)
            raise unknown_field(self.origin, name, left[name])


def unknown_field(origin: str, name: str, value: Any) -> WeightsError:
    """The error for a field that may change the model, and that nothing here reads."""
    return WeightsError(
        f"{origin}: {show(name)[1:-1]}: this library does not know this field, whose value is "
        f"{show(value)}; without it the model might be another"
    )
