"""Types of wgpu-native's header, found by name without a C parser.

For each name of a type that is new to it cffi parses a text which declares every name of the
header, some 430 lines of C. Opening a device and running a model takes forty such names, and the
parser's time was the larger part of a cold start. Declarations that were written down need none
(`declarations.py`); this is for a wgpu that was imported before this library, or as it comes. A
declared name, a pointer to one and an array of one are put together here from what cffi has parsed
already; anything else goes to cffi's parser.
"""

from __future__ import annotations

import re
from typing import Any

NAME = re.compile(r"\s*(\w+)\s*(\*|\[\s*\])?\s*")


def quicken(ffi: Any) -> None:
    """Let `ffi` find declared names so; one without a parser stays as it is."""
    try:
        from cffi import model

        parser = ffi._parser
        slow, declared, pointer_to = (
            parser.parse_type, parser._declarations, parser._get_type_pointer,
        )  # fmt: skip
        primitive = model.PrimitiveType.ALL_PRIMITIVE_TYPES
    except (ImportError, AttributeError):
        return

    def parse_type(text: str) -> Any:
        found = NAME.fullmatch(text)
        name = found[1] if found else ""
        known = (model.PrimitiveType(name), 0) if name in primitive else None
        known = declared.get(f"typedef {name}", known)
        if found is None or known is None:
            return slow(text)
        kind, quals = known
        if found[2] is None:
            return kind
        return pointer_to(kind, quals) if found[2] == "*" else model.ArrayType(kind, None)

    parser.parse_type = parse_type
