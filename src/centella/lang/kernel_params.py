"""The signature of a kernel: what its parameters are, read from the function's annotations.

The forms are:

    x: In[f32]        a tensor to read, rank 1       x: In[f32, 2]   rank 2, with strides
    y: Out[f32]       a tensor to write              z: InOut[f32]   a State to change in place
    x: In[storage]    any storage dtype: the argument's own
    p: Scalar[u32]    a value in device memory       n: u32, s: f32  launch parameters
    *, tile: int      keyword-only without a dtype: a constant that chooses the program
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from centella.dtypes import DType, bool_
from centella.errors import TraceError


class _Storage:
    """Stands for the storage dtype of whichever tensor is passed."""

    def __repr__(self) -> str:
        return "storage"


storage: _Storage = _Storage()


class TensorParam(Struct, frozen=True):
    """A tensor parameter: mode, dtype (None: the argument's own) and rank."""

    mode: str
    dtype: DType | None
    rank: int


class _Mode:
    """How a kernel uses a tensor: `In[f32]`, `Out[f32, 2]`, `InOut[storage]`, `Scalar[u32]`."""

    def __init__(self, mode: str, doc: str) -> None:
        self.mode = mode
        self.__doc__ = doc

    def __getitem__(self, item: Any) -> TensorParam:
        dtype, rank = item if isinstance(item, tuple) else (item, 1)
        if not isinstance(dtype, (DType, _Storage)) or rank not in (1, 2):
            raise TraceError(
                f"{self!r}[...] takes a dtype and a rank of 1 or 2 (pass higher ranks as "
                f"reshape(-1)), got {item!r}"
            )
        if self.mode == "scalar" and (rank != 1 or getattr(dtype, "itemsize", 0) != 4):
            raise TraceError(f"Scalar[...] takes f32, i32 or u32, got {item!r}")
        return TensorParam(self.mode, dtype if isinstance(dtype, DType) else None, rank)

    def __repr__(self) -> str:
        return {"in": "In", "out": "Out", "inout": "InOut", "scalar": "Scalar"}[self.mode]


In: Any = _Mode(
    "in",
    "A tensor that a kernel reads: `In[f32]` flat, `In[f32, 2]` as a matrix with strides, "
    "`In[lang.storage]` of the argument's own dtype.",
)
Out: Any = _Mode(
    "out", "A tensor that a kernel writes, declared as `In` is; the launch gives it a new value."
)
InOut: Any = _Mode("inout", "A State that a kernel changes in place, declared as `In` is.")
Scalar: Any = _Mode(
    "scalar", "One value in device memory, read by `s.value`: `Scalar[f32]`, `[i32]` or `[u32]`."
)


class Signature(Struct, frozen=True):
    """The parameters of a kernel, by kind and in order."""

    tensors: tuple[tuple[str, TensorParam], ...]
    scalars: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the tensor parameters, in order."""
        return tuple(name for name, _ in self.tensors)

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of what a launch gives: tensors, then scalars."""
        return (*self.tensor_names, *(name for name, _ in self.scalars))


NONE: Mapping[str, int] = {}


def signature(
    reads: Mapping[str, int], writes: Mapping[str, int], changes: Mapping[str, int] = NONE
) -> Signature:
    """Tensor parameters by name and rank, each in the storage dtype of its argument.

    Args:
        changes: those that are read and written in place.
    """
    modes = {"in": reads, "out": writes, "inout": changes}
    params = ((n, TensorParam(mode, None, r)) for mode, by in modes.items() for n, r in by.items())
    return Signature(tuple(params), (), ())


REQUIRED = inspect.Parameter.empty


def signature_of(fn: Callable[..., Any]) -> Signature:
    """Read a kernel's signature from its annotations.

    Raises:
        TraceError: naming the parameter whose annotation is missing or is none of the forms.
    """
    try:
        declared = inspect.signature(fn, eval_str=True)
    except NameError as error:
        raise TraceError(
            f"kernel {fn.__name__!r}: an annotation cannot be evaluated ({error}); import its name "
            f"at module level, or leave out `from __future__ import annotations` there"
        ) from error
    tensors: list[tuple[str, TensorParam]] = []
    scalars: list[tuple[str, str]] = []
    constants: list[tuple[str, Any]] = []
    for name, parameter in declared.parameters.items():
        note = parameter.annotation
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            plain = str(parameter.replace(annotation=REQUIRED))
            raise TraceError(
                f"kernel {fn.__name__!r}: parameter {plain!r} has no name that a launch could use"
            )
        if isinstance(note, TensorParam):
            tensors.append((name, note))
        elif isinstance(note, DType) and (note.itemsize == 4 or note is bool_):
            if note is bool_:
                raise TraceError(f"kernel {fn.__name__!r}: parameter {name!r}: pass bools as u32")
            scalars.append((name, note.name))
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            constants.append((name, parameter.default))
        else:
            raise TraceError(
                f"kernel {fn.__name__!r}: parameter {name!r} must be annotated In[...], Out[...], "
                f"InOut[...], Scalar[...], f32, i32 or u32, or be keyword-only (a constant); "
                f"got {'none' if note is parameter.empty else repr(note)}"
            )
    return Signature(tuple(tensors), tuple(scalars), tuple(constants))
