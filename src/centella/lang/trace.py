"""`trace`: records one specialisation of a kernel function.

The function runs once per specialisation; its source is never read. Python `for`, `if` and numbers
act while it runs; the functions of `centella.lang` act on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from centella.dtypes import DType
from centella.errors import TraceError
from centella.lang.blocks import line_in
from centella.lang.ir import KernelIR
from centella.lang.kernel_params import Signature, TensorParam
from centella.lang.memory import Argument, ScalarArgument
from centella.lang.tracer import Tracer, recording


def trace(
    fn: Callable[..., Any], signature: Signature, *, workgroup: int, dtypes: Mapping[str, DType],
    unit: Mapping[str, bool] | None = None, constants: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> KernelIR:  # fmt: skip
    """Record one specialisation of a kernel function.

    Args:
        fn: the kernel function; signature: its parameters (`signature_of(fn)`).
        workgroup: threads a group.
        dtypes: storage dtype of each tensor parameter.
        unit: False for tensors whose last dimension is strided (default: all True).
        constants: values of the keyword-only parameters.

    Returns:
        The kernel, equal (by digest) for equal arguments in every process.

    Raises:
        TraceError: at the line that the language cannot express; it names that and the kernel.
    """
    tracer = Tracer(name or fn.__name__, workgroup)
    with recording(tracer), _located(tracer.name, fn):
        operands = {
            n: _operand(
                tracer, position, n, param, dtypes.get(n), unit is None or unit.get(n, True)
            )
            for position, (n, param) in enumerate(signature.tensors)
        }
        scalars = {n: tracer.param((n,), type_) for n, type_ in signature.scalars}
        fn(**operands, **scalars, **(constants or {}))
        return tracer.finish(tuple(o.declaration() for o in operands.values()))


@contextmanager
def _located(name: str, fn: Callable[..., Any]) -> Iterator[None]:
    """Put the kernel's name and the line at fault after the text of a TraceError."""
    try:
        yield
    except TraceError as error:
        line = line_in(error.__traceback__) or _first_line(fn)
        at = f" at {line}" if line else ""
        error.args = (f"{error} (kernel {name!r}{at})",)
        raise


def _operand(
    tracer: Tracer, position: int, name: str, param: TensorParam, dtype: DType | None, unit: bool
) -> Argument | ScalarArgument:
    """A tensor parameter as the function sees it; `dtype` is the storage asked for."""
    storage = param.dtype or dtype
    if storage is None:
        raise TraceError(f"say which storage {name!r} has (dtypes=)")
    if dtype is not None and dtype is not storage:
        raise TraceError(f"{name!r} is declared {storage.name}, got {dtype.name}")
    if param.mode == "scalar":
        return ScalarArgument(tracer, position, name, storage)
    return Argument(tracer, position, name, param.mode, storage, param.rank, unit)


def _first_line(fn: Callable[..., Any]) -> str:
    """Where a kernel function begins, as far as it has a place."""
    code = getattr(fn, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""
