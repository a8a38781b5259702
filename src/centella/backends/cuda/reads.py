"""Read-backs of a few bytes by a launch that writes into pinned memory.

Between two graphs a copy engine's work holds up a stream for some 10 us, such a launch for 2 (H200,
benchmarks/LOG.md): a token of a decoder, or the vector of a sentence.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from centella import lang
from centella.backends.cuda.driver import check, driver
from centella.backends.cuda.memory import host_address
from centella.dtypes import u32
from centella.emit.program import Kernel, Program
from centella.lang.kernel_params import signature
from centella.lang.memory import Argument
from centella.specs import Caps

FEW = 16 << 10  # bytes of a read-back at most
THREADS = 128


def _read_back(*, x: Argument, y: Argument) -> None:
    """Copy words."""
    word = lang.global_id()
    with lang.if_(word < lang.parameter("words", u32)):
        y[word] = x[word]


KERNEL: Kernel = Kernel(
    _read_back, workgroup=THREADS, name="read_back", signature=signature({"x": 1}, {"y": 1})
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
    # The driver copies the struct while it takes the launch: addresses, groups, words, offsets.
    data = np.frombuffer(bytearray(struct.pack("<2Q4I", source, target, groups, words, 0, 0)),
                         np.uint8)  # fmt: skip
    pointers = np.array([host_address(data)], np.uint64)
    check(driver.cuLaunchKernel(
        function, groups, 1, 1, THREADS, 1, 1, 0, stream, host_address(pointers), 0
    ))  # fmt: skip
