"""The table of quantised formats, and the public functions that give planes as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from centella.dtypes import Array
from centella.errors import DTypeError

if TYPE_CHECKING:
    from centella.ops.quant.format import Format

# Each has a file, of its name or in FILES, which loads when it is asked for: its Format is the name
# in capitals.
ROWS = (
    "int8", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4",
    "iq4_nl", "iq4_xs",
)  # fmt: skip
FILES: dict[str, str] = {
    **dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1"), "fours_fives"),
    **dict.fromkeys(("iq4_nl", "iq4_xs"), "iq4"),
}


class _Formats(Mapping[str, "Format"]):
    def __getitem__(self, name: str) -> Format:
        if name not in ROWS:
            raise KeyError(name)
        module = import_module(f"{__package__}.{FILES.get(name, name)}")
        return cast("Format", getattr(module, name.upper()))

    def __contains__(self, name: object) -> bool:
        return name in ROWS

    def __iter__(self) -> Iterator[str]:
        return iter(ROWS)

    def __len__(self) -> int:
        return len(ROWS)


FORMATS: Mapping[str, Format] = _Formats()


def format_of(op: str, format: str | Format) -> Format:
    """The format of a name.

    Raises:
        DTypeError: there is none of that name.
    """
    if not isinstance(format, str):
        return format
    if format not in FORMATS:
        raise DTypeError(f"{op}: expected a format of {', '.join(FORMATS)}, got {format!r}")
    return FORMATS[format]


def encoded(op: str, format: str | Format, weight: Any) -> tuple[Array, ...]:
    """The planes of a host array; `op` asks, for errors.

    Raises:
        DTypeError: no such format, or it has no quantiser; ShapeError: see `Format.encode`.
    """
    kind = FORMATS.get(format) if isinstance(format, str) else format
    if kind is None or kind.encode is None:
        able = ", ".join(name for name, kind in FORMATS.items() if kind.encode is not None)
        got = repr(format) if kind is None else f"{kind.name}, which has no quantiser"
        raise DTypeError(f"{op}: expected a format of {able}, got {got}")
    return kind.encode(op, weight)


def quantize_int8(weight: Any) -> tuple[Array, Array]:
    """A weight as int8 with a factor for each row: `weight[i] ~ stored[i] * scale[i]`.

    Symmetric: scale[i] = max_j |weight[i, j]| / 127, and each element is rounded to nearest even,
    so it is off by at most half a scale. A row of zeros has scale 0.

    Args:
        weight: [out_features, in_features], a host array of any float dtype.

    Returns:
        int8 [out_features, in_features] and float32 [out_features], as `ct.linear` takes them.

    Raises:
        ShapeError, DTypeError: not a matrix; not floats, or not finite in f32.
    """
    stored, scale = encoded("quantize_int8", "int8", weight)
    return stored, scale


def quantize_blocks(weight: Any, bits: int = 8) -> tuple[Array, Array]:
    """A weight in blocks of 32 along its rows: small integers, and a factor for each block.

    The numbers are those of GGUF's Q8_0 and Q4_0 (ggml's reference quantisation). 8 bits:
    factor = max |w| / 127, numbers from -127 to 127. 4 bits: factor = w / -8 of the element that is
    largest by amount, numbers from -8 to 7, stored 8 higher, two a byte: of a block the first 16 in
    the low halves, the others in the high ones.

    Args:
        weight: [out_features, in_features], a host array of any float dtype; in_features is a
            multiple of 32.
        bits: 8 or 4.

    Returns:
        int8 [out_features, in_features] or uint8 [out_features, in_features / 2], and float16
        [out_features, in_features / 32], as `ct.linear` takes them with `scale=`.

    Raises:
        ShapeError, DTypeError: other shapes; not floats, or not finite, or a factor above
            what f16 holds; one below 6e-8 is 0, and its block with it.
    """
    if bits not in (4, 8):
        raise DTypeError(f"quantize_blocks: expected 4 or 8 bits, got {bits!r}")
    stored, scale = encoded("quantize_blocks", f"q{bits}_0", weight)
    return stored, scale
