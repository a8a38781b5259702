"""The exceptions of centella, all derived from `CentellaError`.

A base class after the name is one of Python's own:

    CentellaError
    ├── ShapeError(ValueError)          operands whose shapes do not fit
    ├── DTypeError(TypeError)           a dtype an op does not take
    ├── TraceError                      a kernel that the language cannot express
    ├── DeviceError(RuntimeError)       no such device, or operands of two devices
    │   └── DeviceLostError             the device is gone; open it again
    ├── CompileError                    source the driver refused (numbered source, log)
    ├── LimitError                      larger than the device allows
    ├── OutOfMemoryError(MemoryError)   no room left on the device
    ├── TransferForbidden               a copy or compile inside `forbid`
    ├── ContractError                   a rule of recordings, plans or State broken
    │   └── DiscardedError              a value that its batch did not keep
    ├── KVCacheFullError                more positions than the cache holds
    ├── WeightsError(ValueError)        a model file that does not fit (file, tensor)
    ├── AudioError                      samples that cannot be read
    ├── SimulationError                 a fault the kernel simulator found
    └── MissingExtraError(ImportError)  an optional package, with its pip line
"""

from __future__ import annotations

from typing import Any


class CentellaError(Exception):
    """Base of every error that centella raises."""


class ShapeError(CentellaError, ValueError):
    """A shape, or the value of an argument, that does not fit: what was expected, what came."""


class DTypeError(CentellaError, TypeError):
    """A dtype, or the type of an argument, that is not taken; an argument that there is not."""


class TraceError(CentellaError):
    """A kernel function that the language cannot express, raised at the line in question."""


class DeviceError(CentellaError, RuntimeError):
    """No such device, no adapter, or operands that live on two devices."""


class DeviceLostError(DeviceError):
    """The device was lost (reset, unplugged, failed after submission); open it again."""


class CompileError(CentellaError):
    """The driver refused a program: carries the numbered source and the driver's log."""

    def __init__(self, name: str, source: str, log: str) -> None:
        self.name = name
        self.source = source
        self.log = log
        lines = source.splitlines()
        width = len(str(len(lines)))
        numbered = "\n".join(f"{i:>{width}} | {line}" for i, line in enumerate(lines, 1))
        super().__init__(f"kernel {name!r} did not compile:\n{log.strip()}\n\n{numbered}")

    def __reduce__(self) -> tuple[Any, ...]:
        return CompileError, (self.name, self.source, self.log), {"args": self.args}


class LimitError(CentellaError):
    """Larger than the device allows: names the limit, its value and what was asked."""


class OutOfMemoryError(CentellaError, MemoryError):
    """No room left on the device."""


class TransferForbidden(CentellaError):
    """A transfer, compile or allocation inside a scope that forbids it."""


class ContractError(CentellaError):
    """A rule of recordings, plans, State or ledger expectations was broken."""


class DiscardedError(ContractError):
    """A value that its batch was told it need not keep; names the op and line."""


class KVCacheFullError(CentellaError):
    """More positions than the key-value cache holds."""


class WeightsError(CentellaError, ValueError):
    """A model file that does not fit: names the file, the tensor, expected and got."""


class AudioError(CentellaError):
    """Samples that cannot be read or resampled."""


class SimulationError(CentellaError):
    """A fault that the kernel simulator found: out of bounds, race, unwritten, divergent."""


class MissingExtraError(CentellaError, ImportError):
    """An optional package is missing; the text has the pip line that installs it.

    Args:
        package: its name; extra: the extra that brings it; needed: what the text says before that.
    """

    def __init__(self, package: str, extra: str, needed: str = "") -> None:
        self.package = package
        self.extra = extra
        self.needed = needed
        super().__init__(
            f"{needed}{package!r} is not installed; install it with: "
            f"pip install 'centella[{extra}]'"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return MissingExtraError, (self.package, self.extra, self.needed)
