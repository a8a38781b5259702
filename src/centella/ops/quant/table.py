"""The table of quantised formats, and the public functions that give planes as arrays."""

from __future__ import annotations

from typing import Any

from centella.dtypes import Array
from centella.errors import DTypeError
from centella.ops.quant.format import Format
from centella.ops.quant.int8 import INT8
from centella.ops.quant.mxfp4 import MXFP4
from centella.ops.quant.q2_k import Q2_K
from centella.ops.quant.q3_k import Q3_K
from centella.ops.quant.q4_0 import Q4_0
from centella.ops.quant.q4_1 import Q4_1
from centella.ops.quant.q4_k import Q4_K
from centella.ops.quant.q5_0 import Q5_0
from centella.ops.quant.q5_1 import Q5_1
from centella.ops.quant.q5_k import Q5_K
from centella.ops.quant.q6_k import Q6_K
from centella.ops.quant.q8_0 import Q8_0

FORMATS: dict[str, Format] = {
    f.name: f for f in (INT8, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, MXFP4)
}


def format_of(op: str, given: object) -> Format:
    """The format of a name.

    Raises:
        DTypeError: there is none of that name.
    """
    found = given if isinstance(given, Format) else FORMATS.get(str(given))
    if found is None:
        raise DTypeError(f"{op}: expected a format of {', '.join(FORMATS)}, got {given!r}")
    return found


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
    assert INT8.encode is not None
    stored, scale = INT8.encode("quantize_int8", weight)
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
    encode = (Q8_0 if bits == 8 else Q4_0).encode
    assert encode is not None
    stored, scale = encode("quantize_blocks", weight)
    return stored, scale
