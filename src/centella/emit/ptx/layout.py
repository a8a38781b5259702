"""What a launch must know of the text: its entry's name, and where parameters and arrays lie.

A 1-D grid of at least `groups` blocks of `workgroup` threads; blocks past `groups` return. The one
kernel parameter is a struct (`param_layout`): tensor maps of 128 bytes, 64-bit addresses of the
tensor arguments in order, u32 number of groups, the launch parameters of 4 bytes in order.
Workgroup memory past 48 KiB is dynamic: the launch passes `shared_layout(ir).dynamic` bytes. Of a
kernel that is `resident` the launch has as many blocks as the device holds at a time, at most.
"""

from __future__ import annotations

import re

from msgspec import Struct

from centella.lang.ir import KernelIR

STATIC_SHARED_BYTES = 48 * 1024
MAP_BYTES = 128


class ParamLayout(Struct, frozen=True):
    """Byte offsets in the parameter struct, and its size."""

    pointers: tuple[int, ...]
    groups: int
    scalars: tuple[int, ...]
    size: int


class SharedLayout(Struct, frozen=True):
    """Byte offsets of the workgroup arrays (and of the word of `workgroup_uniform`), total size."""

    offsets: tuple[int, ...]
    uniform: int
    size: int
    align: int = 16

    @property
    def dynamic(self) -> int:
        """Bytes that the launch must pass as dynamic shared memory."""
        return self.size if self.size > STATIC_SHARED_BYTES else 0


def param_layout(ir: KernelIR) -> ParamLayout:
    """Where the launch writes addresses, the number of groups and the scalars."""
    first = MAP_BYTES * len(ir.maps)
    groups = first + 8 * len(ir.args)
    scalars = tuple(groups + 4 + 4 * i for i in range(len(ir.params)))
    size = groups + 4 + 4 * len(scalars)
    return ParamLayout(tuple(range(first, groups, 8)), groups, scalars, size)


def shared_layout(ir: KernelIR) -> SharedLayout:
    """Where the workgroup arrays lie: each on its alignment, in order."""
    offsets, size = [], 0
    for array in ir.shared:
        size = -(-size // array.align) * array.align
        offsets.append(size)
        size += (4 * array.words + 15) // 16 * 16
    uses_word = ir.first({"workgroup_uniform"}) != ""
    align = max((array.align for array in ir.shared), default=16)
    return SharedLayout(tuple(offsets), size, size + 16 * uses_word, align)


def entry_name(ir: KernelIR) -> str:
    """The name of the entry point: the kernel's, as a PTX identifier."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", ir.name)
    return name if name[:1].isalpha() else f"k{name}"
