"""Copies of a few bytes from and to pinned memory by a launch.

Beside a graph a copy engine's work holds up a stream for some 10 us, such a launch for 2 (H200,
benchmarks/LOG.md): the ids of a sentence and its vector, or a token of a decoder.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from centella import lang
from centella.backends.cuda.driver import check, driver
from centella.dtypes import u32
from centella.emit.program import Kernel, Program
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.specs import Caps

FEW = 16 << 10  # bytes at most
# The parameters (addresses, groups, words, offsets of both), then the pointer to them.
LAUNCH, POINTER = struct.Struct("<2Q4IQ"), 8
THREADS = 128


def few(nbytes: int) -> bool:
    """Whether so many bytes are copied by a launch."""
    return nbytes <= FEW and nbytes % 4 == 0


def _copy_words(*, x: Argument, y: Argument) -> None:
    """Copy words."""
    word = lang.global_id()
    with lang.if_(word < lang.parameter("words", u32)):
        y[word] = x[word]


KERNEL: Kernel = Kernel(
    _copy_words, workgroup=THREADS, name="copy_words", signature=signature({"x": 1}, {"y": 1})
)


def program_on(caps: Caps) -> Program:
    """The launch as a device takes it."""
    return KERNEL.program(caps, (u32, u32), (True, True), (), None, None)


def bring(function: Any, source: int, target: int, nbytes: int, stream: Any) -> None:
    """Put the launch on a stream.

    Args:
        function: the driver's, of `program_on`.
        source, target: addresses, on whole words; nbytes: a multiple of 4.
    """
    words = nbytes // 4
    groups = -(-words // THREADS)
    # The driver copies the parameters while it takes the launch.
    memory = bytearray(LAUNCH.size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    LAUNCH.pack_into(memory, 0, source, target, groups, words, 0, 0, start)
    pointers = start + LAUNCH.size - POINTER
    check(driver.cuLaunchKernel(
        function, groups, 1, 1, THREADS, 1, 1, 0, stream, pointers, 0
    ))  # fmt: skip
