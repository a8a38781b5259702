"""Tensor arguments and workgroup memory, as a kernel function sees them.

Storage is addressed in 32-bit words or 16-byte chunks. Everything about storage types is here and
in `packing`: emitters and the simulator only know words. Elements are unpacked after a load and
packed before a store; a store writes whole words, so that no word is shared by two threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from msgspec.structs import replace

from centella.dtypes import DType
from centella.errors import TraceError
from centella.lang.ir import BufferArg, SharedArray
from centella.lang.packing import pack, unpack
from centella.lang.tracer import Tracer
from centella.lang.values import Expr, Index, Operand, Value, adapt, expr_of

WORD_OF = {"f32": "f32", "i32": "i32"}


def no_atomics(dtype: str) -> str:
    """Why words of a dtype do not change atomically."""
    return (
        f"atomics are for i32 and u32, got {dtype}; sums of floats would depend on the order of "
        f"threads: use lang.workgroup_reduce and a second launch"
    )


def _index(tracer: Tracer, value: Value) -> Expr:
    expr = adapt(tracer, value, "u32")
    if expr.type == "i32":
        return tracer.pure("bitcast", "u32", (expr,))
    if expr.type != "u32":
        raise TraceError(f"an index must be u32 (or i32, not negative), got {expr.type}")
    return expr


class _Array:
    """What tensor arguments and workgroup memory share: they hold values and are none."""

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # an array is no value
    _access: str = ""  # "chunks" or "atomics", once one occurred

    def _accessed(self, how: str) -> None:
        """Note an access by a chunk or an atomic; WGSL has no array that takes both."""
        if self._access not in ("", how):
            raise TraceError(
                "an array that changes atomically is accessed by words, x[i], not by chunks "
                "(load, store), in the whole kernel"
            )
        self._access = how

    def __iter__(self) -> Any:
        raise TraceError("an array cannot be iterated: use lang.range(n) and an index")


class _Extents:
    """The extents of a tensor argument, which are launch parameters: `x.shape(axis)`."""

    def __init__(self, argument: Argument) -> None:
        self._argument = argument

    def __call__(self, axis: int) -> Expr:
        x = self._argument
        if axis not in range(-x.rank, x.rank):
            raise TraceError(f"{x.name!r} has rank {x.rank}, got axis {axis!r}")
        return x._tracer.param((x.name, "shape", axis % x.rank), "u32")

    def __getitem__(self, axis: Any) -> Any:
        name = self._argument.name
        raise TraceError(f"in a kernel {name}.shape is a function of the axis: {name}.shape(0)")

    def __iter__(self) -> Any:
        return self[0]


class Argument(_Array):
    """A tensor argument of rank 1 or 2: `x[i]`, `x[i, j]`, `x.load(...)`, `y.store(...)`.

    `load(i)` reads the 16-byte chunk that starts at element `i` (a multiple of the elements a
    chunk holds) as a list of values. `store(i, values)` writes one word or one chunk of values.
    `y[i] = v` is for 4-byte dtypes.
    """

    def __init__(
        self, tracer: Tracer, index: int, name: str, mode: str, dtype: DType, rank: int, unit: bool
    ) -> None:
        self._tracer = tracer
        self.position = index
        self.name = name
        self.mode = mode
        self.dtype = dtype
        self.rank = rank
        self._unit = unit
        self._word = WORD_OF.get(dtype.name, "u32")
        self._stored = False

    def declaration(self) -> BufferArg:
        """What the trace found out about this argument."""
        if self.mode == "out" and not self._stored:
            raise TraceError(f"output {self.name!r} is never written")
        width, atomic = 4 if self._access == "chunks" else 1, self._access == "atomics"
        return BufferArg(self.name, self.mode, self.dtype, self._word, width, atomic)

    @property
    def shape(self) -> _Extents:
        """`x.shape(axis)`: the extent of one axis, a uniform u32."""
        return _Extents(self)

    @property
    def size(self) -> Any:
        """Refused: a length is a launch parameter."""
        raise TraceError(
            f"{self.name}.size is not known in a kernel: pass sizes as u32 parameters, or use "
            f"{self.name}.shape(axis)"
        )

    def _element(self, key: Index) -> Expr:
        t = self._tracer
        parts = key if isinstance(key, tuple) else (key,)
        if len(parts) != self.rank:
            raise TraceError(f"{self.name!r} has rank {self.rank}, got {len(parts)} indices")
        indices = [_index(t, p) for p in parts]
        inner = indices[-1]
        if not self._unit:
            stride = t.param((self.name, "stride", self.rank - 1), "u32")
            inner = t.pure("mul", "u32", (inner, stride))
        start = t.param((self.name, "offset"), "u32")
        for axis, index in enumerate(indices[:-1]):
            stride = t.param((self.name, "stride", axis), "u32")
            start = t.pure("add", "u32", (start, t.pure("mul", "u32", (index, stride))))
        return t.pure("add", "u32", (start, inner))

    def _shift(self, element: Expr, elements: int) -> Expr:
        shift = self._tracer.constant(elements.bit_length() - 1, "u32")
        return self._tracer.pure("shr", "u32", (element, shift))

    def _may(self, mode: str) -> None:
        if mode == "load" and self.mode == "out":
            raise TraceError(f"{self.name!r} is an Out argument and cannot be read; use InOut")
        if mode == "store" and self.mode not in ("out", "inout"):
            raise TraceError(f"{self.name!r} is an {self.mode} argument and cannot be written")

    def __getitem__(self, key: Index) -> Expr:
        self._may("load")
        t = self._tracer
        element = self._element(key)
        index = self._shift(element, self.dtype.per_word)
        id_ = t.effect("load", self._word, (index,), self.position)
        word = t.result(id_, self._word, False)
        if self.dtype.per_word == 1:
            return word
        lane = t.pure("and", "u32", (element, t.constant(self.dtype.per_word - 1, "u32")))
        bits = self.dtype.itemsize * 8
        shifted = word >> (lane * bits)
        return unpack(t, shifted, self.dtype, 0)

    def chunk(self, key: tuple[Value, ...]) -> tuple[Expr, Expr]:
        """The index of the 16-byte chunk to read that starts at an element, and the element's."""
        self._may("load")
        if not self._unit:
            raise TraceError(f"{self.name!r}.load needs neighbouring elements (stride 1)")
        self._accessed("chunks")
        element = self._element(key)
        return self._shift(element, self.dtype.per_chunk), element

    def word(self, *key: Value) -> Expr:
        """The index of the 4-byte word that an element is in."""
        self._may("load")
        return self._shift(self._element(key), self.dtype.per_word)

    def within_chunk(self, *key: Value) -> Expr:
        """Elements between an element and where the 16 bytes that it is in begin."""
        return self._element(key) & (self.dtype.per_chunk - 1)

    def atomic(self, key: tuple[Value, ...]) -> tuple[str, Expr]:
        """The type and index of a word that changes atomically."""
        if self.mode != "inout":
            raise TraceError(
                f"{self.name!r} is an {self.mode} argument: an atomic reads and writes, so it "
                f"needs InOut (a State) or lang.shared"
            )
        if self.dtype.kind not in ("int", "uint") or self.dtype.per_word != 1:
            raise TraceError(no_atomics(self.dtype.name))
        self._accessed("atomics")
        return self._word, self._element(key)

    def load_word(self, *key: Value) -> list[Expr]:
        """The 4-byte word starting at an element, as `dtype.per_word` values."""
        self._may("load")
        if not self._unit:
            raise TraceError(f"{self.name!r}.load_word needs neighbouring elements (stride 1)")
        t = self._tracer
        element = self._element(key)
        id_ = t.effect(
            "load", self._word, (self._shift(element, self.dtype.per_word),), self.position
        )
        t.starts[id_] = (element.id, self.dtype.per_word)
        word = t.result(id_, self._word, False)
        return [unpack(t, word, self.dtype, lane) for lane in range(self.dtype.per_word)]

    def load(self, *key: Value) -> list[Expr]:
        """The 16-byte chunk starting at an element, as `dtype.per_chunk` values."""
        per = self.dtype.per_word
        words = self._chunk_words(key)
        return [unpack(self._tracer, w, self.dtype, lane) for w in words for lane in range(per)]

    def load_bits(self, *key: Value) -> list[Expr]:
        """The 16-byte chunk starting at an element, as four u32 words: its elements' bits."""
        t, words = self._tracer, self._chunk_words(key)
        return words if self._word == "u32" else [t.pure("bitcast", "u32", (w,)) for w in words]

    def unpack(self, words: Sequence[Value]) -> list[Expr]:
        """The values of words as they are stored, such as `load_bits` gives."""
        t, per = self._tracer, self.dtype.per_word
        bits = [expr_of(t, w, "u32") for w in words]
        if per == 1:
            return [t.pure("bitcast", self._word, (w,)) for w in bits]
        return [unpack(t, w, self.dtype, lane) for w in bits for lane in range(per)]

    def pack(self, values: Sequence[Value]) -> list[Expr]:
        """The words that store values, as many as there are: what `unpack` undoes."""
        t, per = self._tracer, self.dtype.per_word
        each = [expr_of(t, v, self.dtype.value) for v in values]
        words = [pack(t, each[i : i + per], self.dtype) for i in range(0, len(each), per)]
        return [t.pure("bitcast", "u32", (w,)) if w.type != "u32" else w for w in words]

    def _chunk_words(self, key: tuple[Value, ...]) -> list[Expr]:
        t = self._tracer
        index, element = self.chunk(key)
        kind = f"{self._word}x4"
        id_ = t.effect("load4", kind, (index,), self.position)
        t.starts[id_] = (element.id, self.dtype.per_chunk)
        chunk = t.result(id_, kind, False)
        return [t.pure("extract", self._word, (chunk,), lane) for lane in range(4)]

    def written(self) -> None:
        """Note that it is written by other means than a store here.

        Raises:
            TraceError: it is not to be written.
        """
        self._may("store")
        self._stored = True

    def __setitem__(self, key: Index, value: Value) -> None:
        if self.dtype.per_word != 1:
            raise TraceError(
                f"{self.name!r}[...] = v is for 4-byte dtypes; {self.dtype.name} elements share a "
                f"word: use {self.name}.store(index, values) with {self.dtype.per_word} or "
                f"{self.dtype.per_chunk} values"
            )
        self._may("store")
        t = self._tracer
        word = expr_of(t, value, self._word)
        self._stored = True
        t.effect("store", "", (self._element(key), word), self.position)

    def store(self, *key_and_values: Any) -> None:
        """Write one word or one chunk of values, starting at an element index."""
        *key, values = key_and_values
        self._may("store")
        if not self._unit:
            raise TraceError(f"{self.name!r}.store needs neighbouring elements (stride 1)")
        if isinstance(values, Operand) or not isinstance(values, Sequence):
            raise TraceError(f"{self.name}.store takes a list of values")
        if len(values) not in (self.dtype.per_word, self.dtype.per_chunk):
            raise TraceError(
                f"{self.name}.store takes {self.dtype.per_word} (a word) or "
                f"{self.dtype.per_chunk} (a chunk) values of {self.dtype.name}, got {len(values)}"
            )
        t = self._tracer
        typed = [expr_of(t, v, self.dtype.value) for v in values]
        per = self.dtype.per_word
        words = [pack(t, typed[i : i + per], self.dtype) for i in range(0, len(typed), per)]
        element = self._element(tuple(key))
        self._stored = True
        index = self._shift(element, len(values))
        if len(values) == self.dtype.per_chunk:
            self._accessed("chunks")
        op = "store4" if len(words) == 4 else "store"
        t.starts[t.effect(op, "", (index, *words), self.position)] = (element.id, len(values))


class ScalarArgument:
    """A value in device memory, read-only, in a buffer of its own: `s.value` is uniform."""

    def __init__(self, tracer: Tracer, index: int, name: str, dtype: DType) -> None:
        self._tracer = tracer
        self.position = index
        self.name = name
        self.dtype = dtype
        self._word = WORD_OF.get(dtype.name, "u32")

    @property
    def value(self) -> Expr:
        """The value, uniform over the launch."""
        t = self._tracer
        index = t.param((self.name, "offset"), "u32")
        return t.result(t.effect("load", self._word, (index,), self.position), self._word, True)

    def declaration(self) -> BufferArg:
        """What emitters bind."""
        return BufferArg(self.name, "scalar", self.dtype, self._word, 1)


class Shared(_Array):
    """Workgroup memory: `s[i]`, `s[i] = v`, and 16-byte `s.load(i)`, `s.store(i, values)`."""

    def __init__(self, tracer: Tracer, type_: str, words: int) -> None:
        self._tracer = tracer
        self.type: str = type_
        self.words: int = words
        self.position: int = len(tracer.shared)
        tracer.shared.append(SharedArray(type_, words, 1))

    def __len__(self) -> int:
        return self.words

    def __getitem__(self, key: Value) -> Expr:
        t = self._tracer
        index = _index(t, key)
        id_ = t.effect("sload", self.type, (index,), self.position)
        return t.result(id_, self.type, False)

    def __setitem__(self, key: Value, value: Value) -> None:
        t = self._tracer
        t.effect("sstore", "", (_index(t, key), expr_of(t, value, self.type)), self.position)

    def load(self, key: Value) -> list[Expr]:
        """Four neighbouring words; the index is a multiple of 4."""
        return self._load_chunk(*self._chunk_at(key))

    def store(self, key: Value, values: Sequence[Value]) -> None:
        """Write four neighbouring words; the index is a multiple of 4."""
        self._store_chunk(values, *self._chunk_at(key))

    def load_chunk(self, chunk: Value) -> list[Expr]:
        """`load(4 * chunk)`, without the shift: for addresses that are chunks from the start."""
        return self._load_chunk(_index(self._tracer, chunk))

    def store_chunk(self, chunk: Value, values: Sequence[Value]) -> None:
        """`store(4 * chunk, values)`, without the shift."""
        self._store_chunk(values, _index(self._tracer, chunk))

    def atomic(self, key: tuple[Value, ...]) -> tuple[str, Expr]:
        """The type and index of a word that changes atomically."""
        if self.type not in ("i32", "u32"):
            raise TraceError(no_atomics(self.type))
        self._accessed("atomics")
        t = self._tracer
        t.shared[self.position] = replace(t.shared[self.position], atomic=True)
        return self.type, _index(t, *key)

    def align(self, nbytes: int) -> None:
        """Have it begin on a multiple of so many bytes."""
        array = self._tracer.shared[self.position]
        self._tracer.shared[self.position] = replace(array, align=max(array.align, nbytes))

    def _chunk_at(self, key: Value) -> tuple[Expr, Expr]:
        """The index of the chunk that starts at a word, and the word."""
        t = self._tracer
        word = _index(t, key)
        if isinstance(word.const, int) and word.const % 4:
            raise TraceError(f"a chunk starts at a multiple of 4 words, got {word.const}")
        return t.pure("shr", "u32", (word, t.constant(2, "u32"))), word

    def _chunked(self) -> None:
        if self.words % 4:
            raise TraceError(f"chunk access needs a multiple of 4 words, got {self.words}")
        self._accessed("chunks")
        array = self._tracer.shared[self.position]
        self._tracer.shared[self.position] = replace(array, width=4)

    def _load_chunk(self, chunk: Expr, word: Expr | None = None) -> list[Expr]:
        t = self._tracer
        self._chunked()
        kind = f"{self.type}x4"
        id_ = t.effect("sload4", kind, (chunk,), self.position)
        if word is not None:
            t.starts[id_] = (word.id, 4)
        whole = t.result(id_, kind, False)
        return [t.pure("extract", self.type, (whole,), lane) for lane in range(4)]

    def _store_chunk(self, values: Any, chunk: Expr, word: Expr | None = None) -> None:
        t = self._tracer
        self._chunked()
        if isinstance(values, Operand) or not isinstance(values, Sequence) or len(values) != 4:
            raise TraceError("a chunk of shared memory takes a list of 4 values")
        typed = tuple(expr_of(t, v, self.type) for v in values)
        id_ = t.effect("sstore4", "", (chunk, *typed), self.position)
        if word is not None:
            t.starts[id_] = (word.id, 4)
