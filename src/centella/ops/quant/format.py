"""What a quantised format is: planes of integers and factors, and what they stand for.

A weight [n, k] is several tensors, its planes, which have its rows. Along k, `block` elements share
factors. A kernel reads a plane of bytes, the first, in *steps* of 16 bytes, and whatever else the
elements of a step need from the other planes: element = number x factor + low.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from centella import lang
from centella.dtypes import Array, DType, u32
from centella.errors import DTypeError, ShapeError
from centella.specs import Shape, Spec

CHUNK = 16  # bytes of the first plane in a step
RUN, GROUP = 128, 32  # numbers of a run; that have one factor at least
SYMBOLS = "wstuv"  # planes in the kernel of products, and in the names of their pitches, `ldw`


class Plane(Struct, frozen=True):
    """One of the tensors that a weight consists of.

    Attributes:
        name: as a kernel's operand.
        what: it has, in errors.
        dtype: storage type; None: any float.
        length: elements for each block, [n, k / block * length]; 0: one for each row, [n].
    """

    name: str
    what: str
    dtype: DType | None
    length: int

    def shape(self, n: int, blocks: int) -> Shape:
        """Its extents, for a weight of n rows of so many blocks."""
        return (n, blocks * self.length) if self.length else (n,)

    def fits(self, spec: Spec) -> bool:
        """Whether a tensor has its storage type."""
        return spec.dtype.is_float if self.dtype is None else spec.dtype is self.dtype

    def text(self, block: int) -> str:
        """What is expected of it."""
        per = block // self.length if self.length else 0
        along = {0: "[n]", 1: "[n, k]"}.get(per, f"[n, k / {per}]")
        return f"{self.what}{f' {self.dtype.name}' if self.dtype else ''} {along}"


class Elements(Struct, frozen=True):
    """The elements of a weight at a row, from a column on, as a kernel sees them."""

    format: Format
    planes: Sequence[Any]
    row: Any
    column: Any

    def value(self, index: int, element: Any = 0) -> Any:
        """What a plane has for their block, or for the row; which of several elements."""
        at = self.row * lang.parameter(f"ld{SYMBOLS[index]}", u32)
        length = self.format.planes[index].length
        if length == 1:
            at = at + self.column // self.format.block
        elif length:
            at = at + (self.column // self.format.block * length + element)
        return self.planes[index][at]


def scale_and_low(at: Elements) -> tuple[Any, Any | None]:
    """What the planes of these names have."""
    names = [plane.name for plane in at.format.planes]
    low = at.value(names.index("low")) if "low" in names else None
    return at.value(names.index("scale")), low


class Run(Struct, frozen=True, eq=False):
    """RUN neighbouring numbers of a row, whose other planes lie in shared memory.

    Attributes:
        number: runs before it in the row.
        values: `values(plane, word)`: the elements of a word of the row of a plane.
        word: `word(plane, word)`: the word itself.
        chunk: `chunk(plane, word)`: four words, from one on whose number four divides.
    """

    number: Any
    values: Callable[[int, Any], list[Any]]
    word: Callable[[int, Any], Any]
    chunk: Callable[[int, Any], list[Any]]


def scale_of_block(run: Run, plane: int) -> Any:
    """The 16-bit factor of the block of 256 that a run is of, of which two lie in a word."""
    block = run.number // 2
    return lang.select(block % 2 == 0, *run.values(plane, block // 2))


class Levels(Struct, frozen=True, eq=False):
    """The factors of a block of 256 numbers as integers times what the block has.

    Attributes:
        factors: words of four bytes, one byte for each `Cores.shared` numbers; they are i8 where
            `signed`, else u8.
        scale: what these are multiplied by.
        lows: of each 32 numbers a byte; least: times which it is taken off; or None.
    """

    factors: list[Any]
    scale: Any
    signed: bool = False
    lows: list[Any] | None = None
    least: Any = None


class Cores(Struct, frozen=True, eq=False):
    """How tensor cores take the numbers of a format.

    Attributes:
        numbers: `numbers(word, high, field)`: of a word of stored bytes, words of four numbers in
            bytes: they themselves, or those of the low halves, then of the high ones. Where the
            second plane has high bits, they are in bytes of the word `high`, from a field on.
        factors: `factors(run)`: of each `shared` numbers the factor, and what is added, or None.
        zero: what these numbers, of 0 to 127, are more than they stand for, 0 where `factors` has
            something that is added; None: they are i8.
        high: bits of a number that the second plane has, as `host.high_bits` reads them; 0: none.
        shared: 16 or 32.
        levels: `levels(run)`: where blocks are of 256, the factors of the block that begins with a
            run; then `zero` is 0 or None.
    """

    numbers: Callable[[Any, Any, int], list[Any]]
    factors: Callable[[Run], list[tuple[Any, Any | None]]]
    zero: int | None
    high: int = 0
    shared: int = GROUP
    levels: Callable[[Run], Levels] | None = None


def factors_of_blocks(run: Run, low: bool) -> list[tuple[Any, Any | None]]:
    """Of blocks of 32 what the plane behind the numbers has, and with `low` the next one."""
    planes = range(1, 3 if low else 2)
    scales, *lows = (
        [v for word in range(2) for v in run.values(plane, run.number * 2 + word)]
        for plane in planes
    )
    return [(scale, lows[0][i] if lows else None) for i, scale in enumerate(scales)]


class Format(Struct, frozen=True, eq=False):
    """A quantised format.

    Attributes:
        name: as `ct.quantize` takes it.
        block: elements along k that share factors; 1: those of a row do.
        planes: the first has bytes, its rows are read in chunks.
        numbers: `numbers(words, at)`: in a kernel, what the four words of a step stand for, as
            f32, in the order of k.
        decode: `decode(*planes)`: the weight [n, k] in NumPy, in the float type of the factors.
        encode: `encode(op, weight)`: the planes of a float32 array [n, k]; None where there is no
            quantiser. `op` is who asks, for errors.
        from_blocks: the planes of the blocks of a GGUF file, uint8 [rows, blocks, bytes]; None
            where files have no such blocks.
        few: `few(values, half, at)`: `numbers` of a few bytes, which are integers; of those with
            two elements each, the low (0) or high (1) halves. For CPUs, whose kernels are loops.
        factors: `factors(at)`: in a kernel, the factor of a step's numbers, and what is added to
            their products with it, or None; default: what the planes "scale" and "low" have.
        outs: outputs of a thread of the product of few rows, where its numbers need so many
            registers that more would spill; 0: as many as those of bytes.
        cores: how tensor cores take it, where they do. No plane is f32 then.
    """

    name: str
    block: int
    planes: tuple[Plane, ...]
    numbers: Callable[[list[Any], Elements], list[Any]]
    decode: Callable[..., Array]
    encode: Callable[[str, Array], tuple[Array, ...]] | None = None
    from_blocks: Callable[[Array], tuple[Array, ...]] | None = None
    few: Callable[[list[Any], int, Elements], list[Any]] | None = None
    factors: Callable[[Elements], tuple[Any, Any | None]] = scale_and_low
    outs: int = 0
    cores: Cores | None = None

    def __repr__(self) -> str:
        return f"centella.{self.name}"

    @property
    def step(self) -> int:
        """Elements of a step."""
        return CHUNK * self.block // self.planes[0].length

    @property
    def by_row(self) -> bool:
        """Whether rows have one factor: a product applies it to its sums."""
        return self.block == 1

    def check(self, op: str, specs: Sequence[Spec]) -> tuple[int, int]:
        """Rows and columns of the weight that planes are.

        Raises:
            ShapeError, DTypeError: for planes that do not belong together.
        """
        got = " and ".join(s.dtype.name for s in specs)
        if len(specs) != len(self.planes):
            raise ShapeError(f"{op}: expected {len(self.planes)} planes, got {len(specs)}")
        if not all(p.fits(s) for p, s in zip(self.planes, specs, strict=True)):
            wanted = " and ".join(f"{p.dtype.name if p.dtype else 'float'} {p.what}"
                                  for p in self.planes)  # fmt: skip
            raise DTypeError(f"{op}: expected {wanted}, got {got}")
        stored, length = specs[0], self.planes[0].length
        n, bytes_ = stored.shape if len(stored.shape) == 2 else (0, 1)
        blocks, left = divmod(bytes_, length)
        shapes = tuple(p.shape(n, blocks) for p in self.planes)
        if len(stored.shape) != 2 or left or shapes != tuple(s.shape for s in specs):
            wanted = " and ".join(p.text(self.block) for p in self.planes)
            listed = " and ".join(str(list(s.shape)) for s in specs)
            raise ShapeError(f"{op}: expected {wanted}, got {listed}")
        return n, blocks * self.block
