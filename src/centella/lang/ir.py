"""The kernel IR: a flat list of statements in program order, operands by integer id.

A statement is `(op, type, args, attr)`; its position in the list is the id of its result. Types
are the value types "f32", "i32", "u32", "bool", the 16-byte chunks "f32x4", "i32x4", "u32x4", and
"" for statements without a result. Effects (stores, sets, barriers, control flow) are never
reordered or dropped. The SHA-256 of `KernelIR.text()` is the identity of a kernel, equal in every
process.

Operations, by family (args -> result):

    const()            attr: the number                param()     attr: index into `params`
    thread() group()   u32 ids (group: folded, linear) groups()    number of groups of the launch
    lane() subgroup_size()
    neg abs floor ceil trunc sqrt not(x)               cast(x)     value conversion to the type
    bitcast(x)         same bits, other type
    add sub mul div rem and or xor shl shr min max minn maxn lt le gt ge eq ne(x, y)
    fma(a, b, c)       select(cond, if_true, if_false)
    unpack_f16(w)      attr: half 0 or 1               pack_f16(lo, hi) pack_bf16(lo, hi) -> u32
    extract(v)         attr: lane of a chunk
    load(i) load4(i) store(i, v) store4(i, a, b, c, d)         attr: argument index; i counts words,
                                                               or chunks where the name ends in 4
    sload(i) sload4(i) sstore(i, v) sstore4(i, a, b, c, d)     attr: shared array index
    atomic_add(i, v) atomic_min atomic_max atomic_and atomic_or atomic_xor atomic_exchange(i, v)
    atomic_compare_exchange(i, expected, v) -> the word before; attr: argument index. Of shared
                                                               memory: satomic_add and so on
    var(init) get(var) set(var, v)
    if(cond) else() end()   for(lo, hi, step)   loop()   break_if(cond)
    barrier()          workgroup_uniform(x)
    subgroup_add subgroup_min subgroup_max(x)   shuffle_xor(x)   attr: lane mask

Of PTX alone (`centella.lang.ptx`); t is a register tile, spread over the 32 threads of a warp:

    fragment()         attr: (type, registers a thread)      fragment_fill(t)   attr: the number
    fragment_get(t)    fragment_set(t, v)   attr: which register of the thread
    ex2(x)             2 to the x by the target's own function
    widen_i8(w)        attr: (dtype, half); two i8 of a word as f16 or bf16
    widen_u7(w)        attr: (dtype, half, zero); two numbers of 0 to 127 of a word, less zero
    permute_bytes(w, v, u) attr: which four of their eight bytes, or with 8 added of their signs;
                       None: the number u says it
    rsqrt(x) rcp(x)    1 / sqrt(x) and 1 / x by the target's own functions
    max_f16(w, v) max_bf16(w, v)   the larger of the lower halves and of the upper ones
    ldmatrix(i, t...)  attr: (shared array index, transposed); i counts chunks
    mma(t, t, t)       attr: dtype of the factors; the first tile += the second by the third; with
                       i8 or u8, of the second's bytes, these are integers
    cp_async(i, j, bytes)   attr: (shared array index, argument index); i, j count chunks
    cp_async_commit()  cp_async_wait()   attr: groups that may still be on their way
    prefetch(i)        attr: argument index; i counts words
    fetch_lines()      attr: (argument index, bytes that its loads bring to L2)
    resident()         attr: groups that a multiprocessor shall have registers for
    grid()             groups that run at a time, which take those of the launch in turn
    grid_barrier()     where the threads of all groups that run meet

Of PTX for sm_90 and later alone; r is the rank of a group in its cluster:

    stmatrix(i, t...)  attr: (shared array index, transposed); i counts chunks
    launch_dependents()    the next launch may begin once all groups have said so
    await_launches()       the launches before are over, and what they wrote can be seen
    cluster()          attr: groups of a cluster                 cluster_rank()
    cluster_arrive() cluster_wait()   where the threads of all groups of a cluster meet
    cluster_load(i, r) attr: shared array index; a word of the other group's

Of PTX for sm_90a alone, but for barriers; b counts these (8 bytes), c are coordinates:

    warpgroup()        which 128 threads of the group these are
    mbar_init(b)       attr: (shared array index, arrivals)      mbar_fence()
    mbar_arrive(b) mbar_expect(b, bytes) mbar_wait(b, parity)    attr: shared array index
    mbar_arrive_at(b, r)   attr: shared array index; at the other group's barrier
    cluster_store(i, b, r, v...)   attr: (shared array index, that of the barrier); words
    tma_load(i, b, c...)   attr: (shared array index, that of the barrier, index into `maps`)
    bulk_load(i, j, b, bytes)  attr: (shared array index, argument index, that of the barrier);
                               i, j count chunks
    tma_multicast(i, b, m, c...)   the same, to the groups of the ranks in the mask m
    tma_store(i, c...)     attr: (shared array index, index into `maps`)
    tma_store_commit()     tma_store_wait()   attr: groups that may still be on their way
    async_fence()          what this thread stored to shared memory is there for copies and wgmma
    wgmma(i, j, t, p)  attr: (Matrix, Matrix, dtype); t = a b, plus t where p
    wgmma_held(j, t, a, p)   attr: (Matrix, dtype); the same, the first factor is the tile a
    wgmma_fence() wgmma_commit()   wgmma_wait()   attr: groups that may still be on their way
    setmaxnreg()       attr: registers a thread
    warpgroup_barrier()    warpgroup_uniform(x)   x, which its threads have in common

An `if` with attr (first, threads) is a role: those threads of the group run it, beside other roles.
"""

from __future__ import annotations

from collections.abc import Set
from functools import cached_property
from typing import Any

from msgspec import Struct, field

from centella.dtypes import DType
from centella.lang.structure import OPENS, Statement, matching, unawaited

Number = int | float | bool

MAP_STRIDE = 16  # bytes
INTEGERS = ("i32", "u32")
CONTROL = frozenset({"if", "else", "end", "for", "loop", "break_if"})
FRAGMENT_WRITES = frozenset("fragment_fill fragment_set ldmatrix mma wgmma wgmma_held".split())
COPIES = frozenset({"cp_async", "cp_async_commit", "cp_async_wait"})
BARRIERS = frozenset(
    "mbar_init mbar_fence mbar_arrive mbar_arrive_at mbar_expect mbar_wait".split()
)
HOPPER = frozenset(  # sm_90a alone
    "warpgroup bulk_load tma_load tma_multicast tma_store tma_store_commit tma_store_wait "
    "async_fence wgmma wgmma_held wgmma_fence wgmma_commit wgmma_wait setmaxnreg warpgroup_barrier "
    "warpgroup_uniform".split()
)
CLUSTER = frozenset(
    "cluster cluster_rank cluster_arrive cluster_wait cluster_load cluster_store".split()
)
FROM_90 = CLUSTER | BARRIERS | {"stmatrix", "launch_dependents", "await_launches"}  # and later
AMPERE = (FRAGMENT_WRITES - HOPPER) | COPIES | {"fragment", "fragment_get", "widen_i8", "widen_u7"}
AMPERE |= {
    "max_f16",
    "max_bf16",
    "permute_bytes",
    "rsqrt",
    "rcp",
    "resident",
    "fetch_lines",
    "prefetch",
    "grid",
    "grid_barrier",
}
PTX_ONLY = AMPERE | FROM_90 | HOPPER
ATOMICS = "add min max and or xor exchange compare_exchange".split()
GLOBAL_ATOMICS = frozenset(f"atomic_{name}" for name in ATOMICS)
SHARED_ATOMICS = frozenset(f"satomic_{name}" for name in ATOMICS)
STORES = frozenset({"store", "store4", "tma_store"}) | GLOBAL_ATOMICS
GLOBAL = frozenset({"load", "load4", "store", "store4"}) | GLOBAL_ATOMICS
SHARED = frozenset({"sload", "sload4", "sstore", "sstore4"}) | SHARED_ATOMICS
ACCESSES = GLOBAL | SHARED
INDICES = {  # operands that are indices
    **dict.fromkeys(ACCESSES | {"ldmatrix", "stmatrix", "tma_store", "wgmma_held", "prefetch"}, 1),
    **dict.fromkeys(("mbar_init", "mbar_arrive", "mbar_expect", "mbar_wait"), 1),
    **dict.fromkeys(("cluster_load", "mbar_arrive_at"), 1),
    **dict.fromkeys(("cp_async", "cluster_store", "tma_load", "tma_multicast", "wgmma"), 2),
    "bulk_load": 3,
}
SUBGROUP = frozenset(
    {"subgroup_add", "subgroup_min", "subgroup_max", "shuffle_xor", "lane", "subgroup_size"}
)
COMPARE = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
PURE = frozenset(
    "neg abs floor ceil trunc sqrt not cast bitcast add sub mul div rem and or xor shl shr min max "
    "minn maxn lt le gt ge eq ne fma select unpack_f16 pack_f16 pack_bf16 extract thread group "
    "groups lane subgroup_size param grid warpgroup cluster_rank ex2 widen_i8 widen_u7 max_f16 "
    "max_bf16 permute_bytes rsqrt rcp".split()
)


class BufferArg(Struct, frozen=True):
    """A tensor argument: `mode` is "in", "out", "inout" or "scalar"; `width` words an access.

    `atomic`: some of its words change atomically.
    """

    name: str
    mode: str
    dtype: DType
    word: str
    width: int
    atomic: bool = False

    @property
    def writable(self) -> bool:
        """True when the kernel may store to it."""
        return self.mode in ("out", "inout")


class Param(Struct, frozen=True):
    """A launch parameter of 4 bytes: a scalar argument, or an offset, stride or extent."""

    source: tuple[str | int, ...]
    type: str


class SharedArray(Struct, frozen=True):
    """Workgroup memory: `words` words of type `word`, accessed `width` words at a time.

    It begins on a multiple of `align` bytes. `atomic`: some of its words change atomically.
    """

    word: str
    words: int
    width: int
    align: int = 16
    atomic: bool = False


class Matrix(Struct, frozen=True):
    """How a factor of `wgmma` lies in a shared array, in bytes (PTX ISA, "Matrix Descriptor").

    `swizzle`: of the pattern, and of a row of it; `along_k`: rows are along k; `stride`: from eight
    rows to the next eight; `leading`: from one panel of rows to the next.
    """

    array: int
    swizzle: int
    along_k: bool
    stride: int
    leading: int


HALF = 2  # bytes of an element that a map counts


Sizes = tuple[int, ...]


class MapParam(Struct, frozen=True):
    """A tensor map: boxes of an argument, which is `extents` elements with `strides`.

    `argument` is an index into `args`; `offset`, `extents` and `strides` (those of all dimensions
    but the first, which has 1) are indices into `params`, and count elements. `box` is the extents
    of what one copy moves, `swizzle` the pattern in shared memory, in bytes. `kind` is "f16" or
    "bf16"; where the argument has bytes or words, extents, strides and box count two bytes as an
    element of that dtype: the offset alone counts elements of the argument.

    With several `panels` a copy moves as many boxes that lie beside each other along the first
    dimension, which is whole boxes: to the driver they are a dimension of their own, the third.
    """

    argument: int
    offset: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    kind: str
    panels: int = 1

    def layout(self, words: Any) -> tuple[Sizes, Sizes, Sizes]:
        """Extents, strides and box of the driver's dimensions, with these parameters."""
        extents = [int(words[p]) for p in self.extents]
        strides, box = [1, *(int(words[p]) for p in self.strides)], list(self.box)
        if self.panels > 1:
            width = box[0]
            extents[0:1], extents[2:2] = [width], [extents[0] // width]
            strides[2:2], box[2:2] = [width], [self.panels]
        return tuple(extents), tuple(strides), tuple(box)

    def refused(self, words: Any) -> str:
        """What the driver would not make a map of, with these parameters; "" where it would."""
        extents = [int(words[p]) for p in self.extents]
        strides = [int(words[p]) for p in self.strides]
        apart = [s for n, s in zip(extents[1:], strides, strict=True) if n > 1]
        if self.panels > 1 and extents[0] % self.box[0]:
            return f"a tensor map has whole panels of {self.box[0]} elements, got {extents[0]}"
        if 0 not in extents and not any(s * HALF % MAP_STRIDE for s in apart):
            return ""
        return (
            f"a tensor map has extents of 1 or more and strides of multiples of {MAP_STRIDE} "
            f"bytes, got {extents} and {strides} elements of {HALF} bytes"
        )


class KernelIR(Struct, frozen=True, eq=False, dict=True):
    """A traced kernel: what emitters and the simulator read.

    `lines` has the source line of each statement with an effect. `starts` has, for accesses to a
    word or chunk of elements, the id of the first element's index and what it must be a multiple
    of. Neither is part of the identity.
    """

    name: str
    args: tuple[BufferArg, ...]
    params: tuple[Param, ...]
    shared: tuple[SharedArray, ...]
    workgroup: int
    body: tuple[Statement, ...]
    lines: dict[int, str] = field(default_factory=dict)
    starts: dict[int, tuple[int, int]] = field(default_factory=dict)
    maps: tuple[MapParam, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelIR) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def shared_bytes(self) -> int:
        """Bytes of workgroup memory."""
        return sum(4 * s.words for s in self.shared)

    def first(self, ops: Set[str]) -> str:
        """The first of these operations, or ""; a role is named "role"."""
        if self.ops.isdisjoint(ops):
            return ""
        named = ("role" if s[0] == "if" and s[3] is not None else s[0] for s in self.body)
        return next((op for op in named if op in ops), "")

    @cached_property
    def ops(self) -> frozenset[str]:
        """The operations that occur; a role is named "role"."""
        return frozenset("role" if s[0] == "if" and s[3] is not None else s[0] for s in self.body)

    @cached_property
    def ends(self) -> dict[int, int]:
        """For each statement that opens a block (`else` too), the one that closes it."""
        return matching(self.body)

    @cached_property
    def unawaited(self) -> frozenset[int]:
        """The statements that run before the launches before have been waited for."""
        return frozenset(unawaited(self.body))

    @cached_property
    def early(self) -> tuple[int, ...]:
        """The arguments that are read before the launches before have been waited for."""
        before = [self.body[i] for i in self.unawaited]
        loaded = {s[3] for s in before if s[0] in ("load", "load4")}
        copied = {s[3][1] for s in before if s[0] in ("cp_async", "bulk_load")}
        maps = {s[3][2] for s in before if s[0] in ("tma_load", "tma_multicast")}
        return tuple(sorted(loaded | copied | {self.maps[m].argument for m in maps}))

    @property
    def uses_subgroups(self) -> bool:
        """True when a subgroup operation occurs."""
        return bool(self.first(SUBGROUP))

    @property
    def ptx_only(self) -> str:
        """The first operation that no target but PTX (sm_80 and later) has, or ""."""
        return self.first(PTX_ONLY)

    @cached_property
    def resident(self) -> bool:
        """True when a launch has no more groups than the device holds at a time."""
        return bool(self.first({"grid", "grid_barrier"}))

    @cached_property
    def meets(self) -> bool:
        """True when all groups of a launch meet, so that they have to run together."""
        return bool(self.first({"grid_barrier"}))

    @cached_property
    def cluster(self) -> int:
        """Groups of a cluster; 1 where the kernel has none."""
        return next((int(s[3]) for s in self.body if s[0] == "cluster"), 1)

    def refused(self, groups: int) -> str:
        """Why there is no launch of so many groups, "" where there is."""
        if groups % self.cluster == 0:
            return ""
        return f"{groups} groups are no whole number of clusters of {self.cluster}"

    def text(self) -> str:
        """The canonical text: equal text, equal kernel."""
        head = [f"kernel {self.name} workgroup={self.workgroup}"]
        head += [f"arg {a.name} {a.mode} {a.dtype.name} {a.word}x{a.width}" for a in self.args]
        head += [f"param {'.'.join(map(str, p.source))} {p.type}" for p in self.params]
        head += [
            f"shared {s.word}x{s.width} {s.words}{f' on {s.align}' if s.align != 16 else ''}"
            for s in self.shared
        ]
        head += [f"map {m!r}" for m in self.maps]
        depth = 0
        ids = [f"%{i}" for i in range(len(self.body))]
        for i, (op, type_, args, attr) in enumerate(self.body):
            if op in ("end", "else"):
                depth -= 1
            operands = " ".join(map(ids.__getitem__, args))
            extra = "" if attr is None else f" [{attr!r}]"
            result = f"{ids[i]}:{type_} = " if type_ else ""
            head.append(f"{'  ' * depth}{result}{op} {operands}{extra}".rstrip())
            if op in OPENS or op == "else":
                depth += 1
        return "\n".join(head) + "\n"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical text."""
        return digest_of(self.text())

    def line_of(self, index: int) -> str:
        """The source line that recorded a statement, where it was kept."""
        return self.lines.get(index, f"statement %{index}")


def digest_of(text: str) -> str:
    """SHA-256 of a canonical text."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()
