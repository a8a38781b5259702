"""PTX: assembled by ptxas where there is one, and executed by a small interpreter anywhere.

The interpreter runs the text thread by thread, and its results equal the simulator's bit for bit:
so registers, addresses and control flow are right without a GPU. What the instructions themselves
do is taken from the PTX ISA.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from centella import dtypes, lang
from centella.dtypes import DType, bf16, bool_, f16, f32, i8, i32, u8, u32
from centella.emit.ptx import (
    ROOM,
    TARGETS,
    emit_ptx,
    entry_name,
    literal,
    param_layout,
    shared_layout,
)
from centella.errors import DeviceError, TraceError
from centella.lang import In, InOut, KernelIR, Out, Scalar, storage
from centella.lang.ir import ACCESSES, CONTROL, PTX_ONLY, PURE, SUBGROUP
from centella.simulator.run import simulate
from tests.simulator.test_lang_simulate import row_sum, softmax
from tests.support.lang_common import assembled, cuda_tool, ptxas
from tests.support.lang_programs import GROUPS as PROGRAM_GROUPS
from tests.support.lang_programs import SCALARS, Node, first_words, on_host, program, programs

Words = NDArray[np.uint32]
ARCHS = ("sm_75", "sm_80", "sm_90a", "sm_120")
GROUPS = 2

# -- tools ----------------------------------------------------------------------------------------


PTXAS = cuda_tool("ptxas")
NVDISASM = cuda_tool("nvdisasm")
needs_ptxas = pytest.mark.skipif(PTXAS is None, reason="no ptxas: pip install nvidia-cuda-nvcc")


def assemble(text: str, arch: str, folder: Path, write: bool = False) -> tuple[str, Path]:
    """What `ptxas -v` reports, and the file that it writes, if it is to."""
    if re.sub(r"\D", "", arch) not in re.findall(r"\d+", ptxas("--list-arch")):
        pytest.skip(f"this ptxas does not know {arch}")
    cubin = folder / "kernel.cubin"
    options = "-v", f"-arch={arch}"
    return assembled(text, options, folder / "kernel.ptx", cubin if write else None), cubin


def resources(report: str) -> tuple[int, int]:
    """Registers a thread; bytes of stack and spills."""
    registers = re.search(r"Used (\d+) registers", report)
    assert registers is not None
    memory = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", report)
    return int(registers[1]), sum(map(int, memory))


def assemble_clean(ir: KernelIR, arch: str, folder: Path) -> str:
    """The text of a kernel, which assembles without spills, or waits that ptxas adds to wgmma."""
    text = emit_ptx(ir, arch)
    report, _ = assemble(text, arch, folder)
    assert resources(report)[1] == 0 and "C75" not in report, report
    return text


# -- a PTX interpreter ----------------------------------------------------------------------------

MASK = 0xFFFFFFFF
Operation = Callable[..., Any]
Meeting = tuple[Any, int | str]  # what a thread brings; a lane mask, or what its warp does


# One number, by its bits and by its value: a scalar's `view` takes five times as long.
WORD = np.zeros(1, np.uint32)
FLOAT = WORD.view(np.float32)


def real(bits: int) -> np.float32:
    WORD[0] = bits
    number: np.float32 = FLOAT[0]
    return number


def bits_of(value: Any) -> int:
    FLOAT[0] = value
    return int(WORD[0])


def half_bits(bits: int) -> int:
    return int(np.float16(real(bits)).view(np.uint16))


def bf16_bits(bits: int) -> int:
    nan = bits & 0x7FFFFFFF > 0x7F800000
    return 0x7FFF if nan else (bits + 0x7FFF + (bits >> 16 & 1) & MASK) >> 16


def signed(bits: int) -> int:
    return bits - 2**32 if bits >= 2**31 else bits


def quotient(a: int, b: int) -> int:
    size = abs(a) // abs(b) if b else 1
    return size if (a < 0) == (b < 0) else -size


def on_floats(op: Operation) -> Operation:
    return lambda *x: bits_of(op(*map(real, x)))


def on_signed(op: Operation) -> Operation:
    return lambda *x: op(*map(signed, x)) & MASK


def truncated(low: int, high: int) -> Operation:
    def convert(bits: int) -> int:
        value = float(real(bits))
        return 0 if np.isnan(value) else int(np.trunc(min(max(value, low), high))) & MASK

    return convert


def fused(a: np.float32, b: np.float32, c: np.float32) -> Any:
    return np.float64(a) * np.float64(b) + np.float64(c)


def on_halves(op: Operation, kind: DType, *words: int) -> int:
    """An operation on the two halves of words."""
    low, high = (bits_of(op(*(half_of(w, h, kind) for w in words))) for h in (0, 1))
    rounded = half_bits if kind is dtypes.f16 else bf16_bits
    return rounded(high) << 16 | rounded(low)


COMPARISONS: dict[str, Operation] = {
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
    "neu": lambda a, b: a != b, "nan": lambda a, b: np.isnan(a) or np.isnan(b),
}  # fmt: skip
OPERATIONS: dict[str, Operation] = {
    "add.rn.f32": on_floats(lambda a, b: a + b), "sub.rn.f32": on_floats(lambda a, b: a - b),
    "mul.rn.f32": on_floats(lambda a, b: a * b), "div.rn.f32": on_floats(lambda a, b: a / b),
    "fma.rn.f32": on_floats(fused), "sqrt.rn.f32": on_floats(np.sqrt),
    "ex2.approx.ftz.f32": on_floats(np.exp2), "rcp.approx.f32": on_floats(np.reciprocal),
    "rsqrt.approx.f32": on_floats(lambda x: np.reciprocal(np.sqrt(x))),
    "min.f32": on_floats(np.fmin), "max.f32": on_floats(np.fmax),
    "min.NaN.f32": on_floats(np.minimum), "max.NaN.f32": on_floats(np.maximum),
    "neg.f32": lambda a: a ^ 1 << 31, "abs.f32": lambda a: a & MASK >> 1,
    "cvt.rmi.f32.f32": on_floats(np.floor), "cvt.rpi.f32.f32": on_floats(np.ceil),
    "cvt.rzi.f32.f32": on_floats(np.trunc),
    "neg.s32": lambda a: -a & MASK, "not.b32": lambda a: a ^ MASK,
    "add.s32": lambda a, b: a + b & MASK, "add.u32": lambda a, b: a + b & MASK,
    "sub.s32": lambda a, b: a - b & MASK, "sub.u32": lambda a, b: a - b & MASK,
    "mul.lo.s32": lambda a, b: a * b & MASK, "mul.lo.u32": lambda a, b: a * b & MASK,
    "mad.lo.u32": lambda a, b, c: a * b + c & MASK, "mad.wide.u32": lambda a, b, c: a * b + c,
    "cvta.to.global.u64": lambda a: a,
    "div.s32": on_signed(quotient), "div.u32": lambda a, b: a // b if b else MASK,
    "rem.s32": on_signed(lambda a, b: a - quotient(a, b) * b),
    "rem.u32": lambda a, b: a % b if b else a,
    "min.s32": on_signed(min), "max.s32": on_signed(max), "min.u32": min, "max.u32": max,
    "and.b32": lambda a, b: a & b, "or.b32": lambda a, b: a | b, "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b & MASK if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32": lambda a, b: signed(a) >> min(b, 31) & MASK,
    "bfe.u32": lambda a, start, size: a >> start & (1 << size) - 1,
    "prmt.b32": lambda a, b, c: sum(
        ((a | b << 32) >> 8 * (c >> 4 * i & 7) & 255) << 8 * i for i in range(4)
    ),
    "not.pred": lambda a: not a, "and.pred": lambda a, b: a and b,
    "or.pred": lambda a, b: a or b, "xor.pred": lambda a, b: a != b,
    "cvt.rzi.s32.f32": truncated(-(2**31), 2**31 - 1), "cvt.rzi.u32.f32": truncated(0, MASK),
    "cvt.rn.f32.s32": lambda a: bits_of(signed(a)), "cvt.rn.f32.u32": bits_of,
    "cvt.f32.f16": lambda a: bits_of(np.uint16(a).view(np.float16)),
    "cvt.rn.f16.f32": half_bits,
    "cvt.rn.f16x2.f32": lambda hi, lo: half_bits(hi) << 16 | half_bits(lo),
    "sub.rn.f16x2": lambda a, b: on_halves(lambda x, y: x - y, dtypes.f16, a, b),
    "fma.rn.bf16x2": lambda a, b, c: on_halves(fused, dtypes.bf16, a, b, c),
    "max.NaN.f16x2": lambda a, b: on_halves(np.maximum, dtypes.f16, a, b),
    "max.NaN.bf16x2": lambda a, b: on_halves(np.maximum, dtypes.bf16, a, b),
    "cvt.rn.bf16x2.f32": lambda hi, lo: bf16_bits(hi) << 16 | bf16_bits(lo),
}  # fmt: skip
ATOMICS: dict[str, Operation] = {
    "exch": lambda before, value: value,
    "cas": lambda before, expected, value: value if before == expected else before,
}


@dataclass
class Module:
    """A parsed module: instructions as (guard, operation, operands, what computes it)."""

    code: list[tuple[str, list[str], list[str], Operation | None]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    threads: int = 0
    shared: int = 0

    @classmethod
    def parse(cls, text: str, dynamic: int) -> Module:
        module = cls(threads=int(re.findall(r"reqntid (\d+)", text)[0]), shared=dynamic)
        for line in text[text.index("{\n") + 2 : text.rindex("}")].splitlines():
            for part in line.split("//")[0].split(";"):
                part = part.strip()
                if part.endswith(":"):
                    module.labels[part[:-1]] = len(module.code)
                elif part.startswith(".shared"):
                    module.shared = int(re.findall(r"\[(\d+)\]", part)[0])
                elif part and part[0] != ".":
                    guard, _, rest = part.rpartition("@") if part[0] != "@" else part.partition(" ")
                    op, _, operands = rest.partition(" ")
                    arguments = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", operands)
                    operation = OPERATIONS.get(op)
                    module.code.append((guard.lstrip("@"), op.split("."), arguments, operation))
        return module


def ldmatrix(rows: list[list[int]], count: int, transposed: bool) -> list[list[int]]:
    """Registers of each lane, from the row that each points at (PTX ISA, "ldmatrix")."""
    element = [[word >> 16 * h & 0xFFFF for word in row for h in (0, 1)] for row in rows]
    answers = []
    for lane in range(32):
        at = [(lane // 4, lane % 4 * 2 + h) for h in (0, 1)]
        pairs = [
            [element[8 * j + (c if transposed else r)][r if transposed else c] for r, c in at]
            for j in range(count)
        ]
        answers.append([low | high << 16 for low, high in pairs])
    return answers


def stmatrix(registers: list[list[int]], transposed: bool) -> list[list[int]]:
    """The row that each lane points at (PTX ISA, "stmatrix"); none past the last matrix's."""
    count = len(registers[0])
    element = np.zeros((count, 8, 8), np.int64)
    for lane, words in enumerate(registers):
        for j, word in enumerate(words):
            for h in range(2):
                at = lane // 4, lane % 4 * 2 + h
                element[(j, *(at[::-1] if transposed else at))] = word >> 16 * h & 0xFFFF
    rows = (element[..., ::2] | element[..., 1::2] << 16).reshape(-1, 4).tolist()
    return rows + [[]] * (32 - len(rows))


def mma_bytes(brought: list[tuple[list[int], ...]], kind: type[Any]) -> list[list[int]]:
    """Registers of c in each lane (PTX ISA, "Matrix Fragments for mma.m16n8k32")."""
    a, b, c = np.zeros((16, 32), int), np.zeros((32, 8), int), np.zeros((16, 8), int)
    for lane, (sums, left, right) in enumerate(brought):
        group, within = lane // 4, lane % 4 * 4
        for i, word in enumerate(left):
            row, column = group + i % 2 * 8, within + i // 2 * 16
            a[row, column : column + 4] = np.array([word], "<u4").view(kind)
        for i, word in enumerate(right):
            b[within + i * 16 : within + i * 16 + 4, group] = np.array([word], "<u4").view(np.int8)
        for i, word in enumerate(sums):
            c[group + i // 2 * 8, lane % 4 * 2 + i % 2] = np.array(word, np.uint32).view(np.int32)
    c = c + a @ b
    return [
        [int(c[lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2]) & 0xFFFFFFFF for i in range(4)]
        for lane in range(32)
    ]


def mma(brought: list[tuple[list[int], ...]], kind: DType) -> list[list[int]]:
    """Registers of c in each lane (PTX ISA, "Matrix Fragments for mma.m16n8k16")."""
    a, b = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
    c = np.zeros((16, 8), np.float32)
    for lane, (sums, left, right) in enumerate(brought):
        group, within = lane // 4, lane % 4
        for i in range(8):
            row = group if i < 2 or 4 <= i < 6 else group + 8
            a[row, within * 2 + i % 2 + (8 if i >= 4 else 0)] = half_of(left[i // 2], i % 2, kind)
        for i in range(4):
            row = within * 2 + i % 2 + (8 if i >= 2 else 0)
            b[row, group] = half_of(right[i // 2], i % 2, kind)
        for i in range(4):
            c[group + (8 if i >= 2 else 0), within * 2 + i % 2] = real(sums[i])
    for k in range(16):
        c = c + np.outer(a[:, k], b[k])
    return [
        [bits_of(c[lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + i % 2]) for i in range(4)]
        for lane in range(32)
    ]


def half_of(word: int, half: int, kind: DType) -> Any:
    bits = np.array([word >> 16 * half & 0xFFFF], np.uint16)
    return dtypes.widen(bits.view(kind.numpy), kind)[0]


@functools.cache
def constant(token: str) -> int:
    """The bits of a number in the text."""
    return int(token[2:], 16) if token[:2] in ("0f", "0x") else int(token) & MASK


class Thread:
    """One thread: `run` yields at barriers, shuffles and what a warp does together."""

    def __init__(self, module: Module, ids: dict[str, int], memory: list[Any]) -> None:
        self.module = module
        self.memory = memory  # params, shared words, then the words of each buffer
        self.registers: dict[str, Any] = dict(ids)

    def value(self, token: str) -> Any:
        return self.registers[token] if token[0] == "%" else constant(token)

    def words(self, space: str, token: str, count: int) -> tuple[Words, int]:
        base, _, offset = token[1:-1].partition("+")
        address = self.registers[base] + int(offset or 0)
        where = 1 if space == "shared" else 1 + (address >> 36)
        index, rest = divmod(address & 2**36 - 1, 4)
        words: Words = self.memory[where]
        assert rest == 0, f"{token} is misaligned"
        assert index % count == 0, f"{token} is misaligned"
        assert index + count <= len(words), f"{token} is word {index} of {len(words)}"
        return words, index

    def run(self) -> Generator[Meeting, Any, None]:
        at, value = 0, self.value
        with np.errstate(all="ignore"):
            while True:
                guard, op, operands, operation = self.module.code[at]
                at += 1
                if guard and self.registers[guard.lstrip("!")] == (guard[0] == "!"):
                    continue
                if operation is not None:
                    self.registers[operands[0]] = operation(*map(value, operands[1:]))
                elif op[0] == "ret":
                    return
                elif op[0] == "bra":
                    at = self.module.labels[operands[0]]
                elif op[0] == "bar":
                    yield None, 0
                elif op[0] == "shfl":
                    assert op[2:] == ["bfly", "b32"]
                    assert operands[3:] == ["31", "0xffffffff"]
                    mask = self.value(operands[2])
                    self.registers[operands[0]] = yield self.value(operands[1]), mask
                elif op[0] == "ldmatrix":
                    assert op[1:4] == ["sync", "aligned", "m8n8"]
                    words, index = self.words("shared", operands[1], 4)
                    targets = listed(operands[0])
                    answer = yield [int(w) for w in words[index : index + 4]], ".".join(op)
                    self.registers |= dict(zip(targets, answer, strict=True))
                elif op[0] == "stmatrix":
                    assert op[1:4] == ["sync", "aligned", "m8n8"]
                    brought = [self.value(n) for n in listed(operands[1])]
                    answer = yield brought, ".".join(op)
                    if answer:  # the row that this lane points at
                        words, index = self.words("shared", operands[0], 4)
                        words[index : index + 4] = answer
                elif op[0] == "mma":
                    brought = [[self.value(n) for n in listed(x)] for x in operands[1:]]
                    answer = yield (brought[2], brought[0], brought[1]), ".".join(op)
                    self.registers |= dict(zip(listed(operands[0]), answer, strict=True))
                else:
                    self.step(op, operands)

    def step(self, op: list[str], operands: list[str]) -> None:
        if op[0] == "cp":
            self.copy(op, operands)
            return
        if op[0] == "griddepcontrol":  # one launch alone
            return
        if op[0] == "prefetch":  # which reads nothing
            self.words(op[1], operands[0], 1)
            return
        target, *rest = operands
        if op[:2] == ["ld", "param"]:
            start = int(rest[0][1:-1].partition("+")[2])
            data = self.memory[0][start : start + int(op[2][1:]) // 8]
            self.registers[target] = int.from_bytes(data, "little")
        elif op[0] in ("ld", "st"):
            listed, address = (target, rest[0]) if op[0] == "ld" else (rest[0], target)
            lanes = listed.strip("{}").split(", ")
            assert len(lanes) == (4 if "v4" in op else 1)
            words, index = self.words(op[1], address, len(lanes))
            for lane, name in enumerate(lanes):
                if op[0] == "ld":
                    self.registers[name] = int(words[index + lane])
                else:
                    words[index + lane] = self.registers[name]
        elif op[0] in ("atom", "red"):
            address, *operands = rest if op[0] == "atom" else operands
            words, index = self.words(op[1], address, 1)
            before = int(words[index])
            step = ATOMICS.get(op[2]) or OPERATIONS[f"{op[2]}.{op[3]}"]
            words[index] = step(before, *map(self.value, operands))
            if op[0] == "atom":
                self.registers[target] = before
        elif op[0] == "mov" and target[0] == "{":
            low, high = target.strip("{}").split(", ")
            word = self.value(rest[0])
            self.registers |= {low: word & 0xFFFF, high: word >> 16}
        elif op[0] == "mov" and rest[0][0] == "{":
            low, high = rest[0].strip("{}").split(", ")
            self.registers[target] = self.registers[low] | self.registers[high] << 16
        elif op[0] == "mov":
            self.registers[target] = 0 if rest[0] == "$smem" else self.value(rest[0])
        elif op[0] == "setp":
            views: dict[str, Operation] = {"f32": real, "s32": signed, "u32": int}
            view = views[op[2]]
            a, b = (view(self.value(x)) for x in rest)
            self.registers[target] = bool(COMPARISONS[op[1]](a, b))
        else:
            assert op[0] == "selp", op
            self.registers[target] = self.value(rest[0 if self.registers[rest[2]] else 1])

    def copy(self, op: list[str], operands: list[str]) -> None:
        """cp.async: here it is done at once, the earliest that the hardware may be."""
        if op[2] != "cg":
            assert op[2] in ("commit_group", "wait_group")
            return
        assert operands[2] == "16"
        words, index = self.words("shared", operands[0], 4)
        size = self.value(operands[3])
        if size:
            source, first = self.words("global", operands[1], 4)
            data = source[first : first + 4].tobytes()[:size]
        else:
            data = b""
        words[index : index + 4] = np.frombuffer(data.ljust(16, b"\0"), np.uint32)


def listed(operand: str) -> list[str]:
    """The registers of `{...}`."""
    return operand.strip("{}").split(", ")


def together(key: str, brought: list[Any]) -> list[Any]:
    """What each thread gets of an operation of its warp."""
    parts = key.split(".")
    answers: list[Any] = []
    for warp in range(0, len(brought), 32):
        lanes = brought[warp : warp + 32]
        if parts[0] == "stmatrix":
            assert int(parts[4][1:]) == len(lanes[0])
            answers += stmatrix(lanes, "trans" in parts)
        elif parts[0] == "mma":
            if parts[3] == "m16n8k32":
                answers += mma_bytes(lanes, {"s8": np.int8, "u8": np.uint8}[parts[7]])
                continue
            assert parts[1:7] == ["sync", "aligned", "m16n8k16", "row", "col", "f32"]
            answers += mma(lanes, {"f16": f16, "bf16": bf16}[parts[7]])
        else:
            answers += ldmatrix(lanes, int(parts[4][1:]), "trans" in parts)
    return answers


def advance(thread: Generator[Meeting, Any, None], answer: Any) -> Meeting | None:
    """Where a thread waits next: at a barrier, or with its value for the lane `mask` away."""
    try:
        return thread.send(answer)
    except StopIteration:
        return None


def execute(ir: KernelIR, arch: str, buffers: list[Words], params: Words, groups: int) -> None:
    """Run a kernel's PTX with one block more than the launch asks for."""
    layout = param_layout(ir)
    block = bytearray(layout.size)
    for n, offset in enumerate(layout.pointers):
        block[offset : offset + 8] = (n + 1 << 36).to_bytes(8, "little")
    block[layout.groups : layout.groups + 4] = groups.to_bytes(4, "little")
    for value, offset in zip(params.tolist(), layout.scalars, strict=True):
        block[offset : offset + 4] = value.to_bytes(4, "little")
    module = Module.parse(emit_ptx(ir, arch), shared_layout(ir).dynamic)
    for group in range(groups + 1):
        memory = [bytes(block), np.full(module.shared // 4, 0x7FC0DEAD, np.uint32), *buffers]
        names = ("%tid.x", "%laneid", "%ctaid.x")
        threads = [
            Thread(module, dict(zip(names, (t, t % 32, group), strict=True)), memory).run()
            for t in range(module.threads)
        ]
        answers: list[Any] = [None] * len(threads)
        while True:
            met = [advance(t, answer) for t, answer in zip(threads, answers, strict=True)]
            assert len({m and m[1] for m in met}) == 1, "threads wait at different places"
            if met[0] is None:
                break
            brought, key = [m[0] for m in met if m], met[0][1]
            if isinstance(key, str):
                answers = together(key, brought)
            else:
                answers = [brought[t ^ key] for t in range(len(met))]


# -- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A kernel, how it is specialised, and the sizes of its buffers in elements."""

    fn: Callable[..., Any]
    workgroup: int = 32
    dtypes: dict[str, DType] = field(default_factory=dict)
    unit: dict[str, bool] | None = None
    constants: dict[str, Any] = field(default_factory=dict)
    params: dict[Any, int | float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def trace(self) -> KernelIR:
        signature = lang.signature_of(self.fn)
        given = {name: self.dtypes.get(name, t.dtype or f32) for name, t in signature.tensors}
        return lang.trace(
            self.fn, signature, workgroup=self.workgroup, dtypes=given, unit=self.unit,
            constants=self.constants,
        )  # fmt: skip

    def launch(self, ir: KernelIR) -> tuple[list[Words], Words]:
        """Random inputs, poisoned outputs and the launch parameters."""
        rng = np.random.default_rng(7)
        buffers = []
        for arg in ir.args:
            size = self.sizes.get(arg.name, GROUPS * self.workgroup * 16)
            if arg.dtype.is_float:
                values = rng.standard_normal(size).astype(np.float32) * 3
                array = dtypes.narrow(values, arg.dtype)
            elif arg.dtype.itemsize == 4:
                array = rng.integers(0, 50, size).astype(arg.dtype.numpy)
            else:
                array = rng.integers(0, 2 if arg.dtype is bool_ else 256, size)
                array = array.astype(np.uint8).view(arg.dtype.numpy)
            words: Words = np.ascontiguousarray(array).view(np.uint32)
            buffers.append(words if arg.mode != "out" else np.full_like(words, 0x7FC0BAD0))
        return buffers, np.array([self.parameter(p) for p in ir.params], np.uint32)

    def parameter(self, param: Any) -> int:
        source = param.source if len(param.source) > 1 else param.source[0]
        value = self.params.get(source, 0 if param.source[-1] == "offset" else 37)
        return bits_of(value) if param.type == "f32" else int(value) & MASK


def float_arithmetic(x: In[f32], y: Out[f32], s: f32) -> None:
    i = lang.global_id()
    a, b = x[i], x[i + 64]
    with_nan = lang.select(a > 2.5, a / 0.0 - a / 0.0, a)
    values = [
        a + b, a - b, a * b, a / b, -a, lang.fma(a, b, s), lang.abs(a), lang.floor(a),
        lang.ceil(a), lang.trunc(a), lang.sqrt(a), lang.fmin(a, b), lang.fmax(a, b),
        lang.minimum(with_nan, b), lang.maximum(b, with_nan), lang.exp2_native(lang.trunc(a)) / s,
    ]  # fmt: skip
    for n, value in enumerate(values):
        y[i * 16 + n] = value


def int_arithmetic(x: In[i32], y: Out[i32], n: i32) -> None:
    i = lang.global_id()
    a, b = x[i] - 25, (x[i + 1] - 25) // 4
    shift = lang.cast(b, u32)
    values = [
        a + b, a - b, a * b, a // b, a % b, -a, ~a, a & b, a | b, a ^ b, a << shift, a >> shift,
        lang.minimum(a, b), lang.maximum(a, b), a // n + a // 7 + a % -3, lang.abs(a) + (a // 0),
    ]  # fmt: skip
    for k, value in enumerate(values):
        y[i * 16 + k] = value


def uint_arithmetic(x: In[u32], y: Out[u32], n: u32) -> None:
    i = lang.global_id()
    a, b = x[i] * 0x9E3779B9, x[i + 1] % 5
    values = [
        a + b, a - b, a * b, a // b, a % b, -a, ~a, a & b, a | b, a ^ b, a << b, a >> (b + 30),
        lang.minimum(a, b), lang.maximum(a, b), a // n + a // 7 + a % 6 + a % 8, a % 0 + (a // 0),
    ]  # fmt: skip
    for k, value in enumerate(values):
        y[i * 16 + k] = value


def bools(x: In[f32], y: Out[u32], n: u32) -> None:
    i = lang.global_id()
    a, b = x[i], x[i + 1]
    p, q = a < b, i > n
    flag = lang.var(p)
    always = lang.var(True)
    with lang.if_(q):
        flag.set(flag ^ (a >= 0.0))
        always &= a <= 1.0
    tests = [
        p, q, ~p, p & q, p | q, p ^ q, p == q, p != q, a == b, a != b, i != n, i == 3, i <= n,
        i >= n, lang.select(p, q, flag), flag.get() & always.get(),
    ]  # fmt: skip
    for k, test in enumerate(tests):
        y[i * 16 + k] = lang.cast(test, u32)


def conversions(x: In[f32], y: Out[u32], s: Scalar[u32]) -> None:
    i = lang.global_id()
    a = x[i] * 1.0e9
    a = lang.select(i == 3, a / 0.0 - a / 0.0, a)
    values = [
        lang.bitcast(x[i], u32), lang.cast(lang.cast(a, i32), u32), lang.cast(a, u32),
        lang.bitcast(lang.cast(i * 123456789, f32), u32), s.value + lang.num_groups(),
        lang.bitcast(lang.cast(lang.cast(a, i32), f32), u32), lang.cast(lang.isnan(a), u32),
        lang.bitcast(lang.cast(a > 0.0, f32), u32), lang.cast(lang.cast(a < 0.0, i32), u32),
        lang.cast(lang.cast(a, bool_), u32), lang.cast(lang.cast(i, bool_), u32),
    ]  # fmt: skip
    for k, value in enumerate(values):
        y[i * 16 + k] = value


def moves(x: In[storage], w: In[storage], y: Out[storage], z: Out[storage]) -> None:
    """Elements stored as words, a chunk stored as a chunk."""
    i = lang.global_id()
    y.store(i * y.dtype.per_word, [x[i + k] for k in range(y.dtype.per_word)])
    z.store(i * z.dtype.per_chunk, w.load(i * w.dtype.per_chunk))


def roundings(x: In[f32], h: Out[f16], b: Out[bf16]) -> None:
    """f32 to 16 bits: ordinary values, ties, large, tiny, infinite, NaN."""
    i = lang.global_id()
    bits = lang.bitcast(x[i], u32)
    strange = [bits, bits & 0xFFFF0000 | 0x8000, bits | 0x7F800000, (i << 23) | (bits & 0x7FFFFF),
               (bits & 0x807FFFFF) | 0x38000000, (bits & 0x80000000) | 0x7F800000]  # fmt: skip
    for k, value in enumerate(strange):
        pair = [lang.bitcast(value, f32), -lang.bitcast(value, f32)]
        h.store((i * 8 + k) * 2, pair)
        b.store((i * 8 + k) * 2, pair)


def strided(x: In[f32, 2], y: Out[f32, 2], n: u32) -> None:
    i = lang.global_id()
    with lang.if_(i < n):
        y[i % 8, i // 8] = x[i // 8, i % 8] + lang.cast(x.shape(0), f32)


def control(x: InOut[u32], n: u32) -> None:
    i = lang.global_id()
    total, seen = lang.var(0, u32), lang.var(i)
    for a in lang.range(i % 5):
        for b in lang.range(a, n, 3):
            with lang.if_((a + b) % 2 == 0):
                total += a * b
                with lang.if_(b > 20):
                    total += 7
                with lang.else_():
                    seen.set(seen ^ total)
            with lang.else_():
                total -= 1
        lang.break_if(total > 500)
    for _ in lang.range(2, 2):
        total.set(0)
    for _ in lang.range(0, 4):
        total += 2
    before = seen.get()
    with lang.loop():
        seen += total + 1
        lang.break_if(seen > 1000)
        with lang.if_(seen % 3 == 0):
            seen += 5
    for c in lang.range(lang.const(-3, i32), lang.cast(i % 4, i32)):
        total += lang.cast(c + 3, u32)
    limit = lang.var(i % 7)
    for d in lang.range(limit.get()):
        limit.set(0)
        total += d
    x[i] = x[i] + total * 3 + seen + before * 5


def snapshots(x: InOut[f32]) -> None:
    """Values of variables that change before, inside and after loops."""
    i = lang.global_id()
    a, b = lang.var(x[i]), lang.var(1.0)
    first = a.get()
    a += 1.0
    second = a.get()
    for _ in lang.range(3):
        b.set(b * 0.5 + second)
        a += b
        snapshot = a.get()
        for _ in lang.range(2):
            b += snapshot
            a.set(a * 0.5)
    third = b.get()
    b.set(a.get())
    a.set(third)
    count = lang.var(lang.cast(i, i32))
    old = lang.cast(count.get(), u32)
    count += 9
    x[i] = first + second * a + b * third + lang.cast(old * 2, f32) + lang.cast(count, f32)


def addresses(x: In[f32], y: Out[f32], pad: u32, n: u32) -> None:
    """Constants in indices: folded, except where a part of the sum may pass below 0."""
    i = lang.local_id()
    out = lang.global_id() * 16
    before = i - pad
    position = lang.var(i + 5)
    position -= pad
    values = [
        x[i], x[i + 1], x[1 + i + 2], x[(i + 3) * 2 + 1], x[((i + 1) << 1) + n], x[i + n - 1],
        x[(i + 40) - 3], x[(i - pad + 4) + 1], x[lang.maximum(before + 4, i) + 1], x[position + 7],
        x[lang.cast(lang.cast(i, i32) - 3, u32) + 3], x[(i + 8) >> 1], x[7],
        x[(i + 0xFFFFFFFF) + 1], x[lang.select(i < 1, before, before) + 5],
        x[((i & 3) - 4 + n) + 9],
    ]  # fmt: skip
    for k, value in enumerate(values):
        y[out + k] = value


def branches(x: In[f32], y: InOut[f32], n: u32) -> None:
    """Addresses computed in a branch that some threads do not take."""
    i = lang.global_id()
    first = x[n]
    y[i] = first
    with lang.if_(i < n):
        y[i + 64] = x[i + 1] + x[i + 2]
    with lang.else_():
        y[i + 64] = x[i + 1] - x[i + 2]
    y[i + 128] = x[i + 1] * 2.0


def moved(x: In[f32], w: In[f32], y: Out[f32], n: u32) -> None:
    """Integer arithmetic inside loops that does not depend on them: more than may move."""
    i = lang.local_id()
    total = lang.var(0.0)
    for k in lang.range(n):
        for j in range(40):
            total += x[(i * (j + 3)) % 29 + k]
        for q in lang.range(i // 3, i // 2):
            total += w.load((q + i // 7) * 4)[1] + x[i // n + i % n]
            with lang.if_(q > i * 5 % 9):
                total += x[i ^ 5]
    mixed = lang.var(0, u32)
    for size in range(ROOM - 8, ROOM + 3):  # the last place is taken at every kind of statement
        low, odd = (i + size) & 3, (i + size) & 1
        for _ in lang.range(2):
            for j in range(size):
                mixed += i ^ (j + 1)
            total += x[(i << low) + (i // odd) + (mixed & 7)]
    y[lang.global_id()] = total


def shared_words(x: In[f32], y: Out[f32], *, words: int) -> None:
    me = lang.local_id()
    a, b = lang.shared(f32, words), lang.shared(u32, 33)
    for k in range(0, words, 128):
        a.store(k + (me & 31) * 4, [x[(me & 31) + j] for j in range(4)])
    b[me & 31] = me
    lang.barrier()
    first = lang.workgroup_uniform(lang.cast(me + 3, u32))
    high = lang.workgroup_uniform(x[me] > 0.0)
    lo = lang.workgroup_uniform(x[me + 1])
    values = a.load(((31 - me) & 31) * 4)
    for k in range(4):
        y[(me + lang.group_id() * 32) * 4 + k] = (
            values[k] + lang.cast(b[me ^ 1] + first, f32) + lang.select(high, lo, a[words - 1])
        )


def subgroups(x: In[f32], u: In[u32], y: Out[f32], z: Out[u32]) -> None:
    i = lang.global_id()
    lane = lang.lane_id() + lang.subgroup_size()
    low, high = lang.subgroup_min(x[i]), lang.subgroup_max(x[i])
    y[i] = lang.subgroup_sum(lang.floor(x[i])) + low * high + lang.shuffle_xor(x[i], 5)
    least, most = lang.subgroup_min(u[i]), lang.subgroup_max(lang.cast(u[i], i32))
    z[i] = lang.subgroup_sum(u[i]) * lane + least + lang.cast(most, u32)


def atomics(x: InOut[u32], y: InOut[i32]) -> None:
    everyone, me = lang.global_id(), lang.local_id()
    tile = lang.shared(u32, 32)
    tile[me] = me
    for array, i in ((x, everyone), (y, everyone), (tile, me)):
        value = lang.cast(i * 3, array.dtype if array is y else u32)
        for name in ("add", "min", "max", "and", "or", "xor", "exchange"):
            getattr(lang, f"atomic_{name}")(array, i, value)
        seen = lang.atomic_add(array, i, 1)
        lang.atomic_compare_exchange(array, i, seen + 1, seen + seen)
    x[everyone] = tile[me] + lang.bitcast(y[everyone], u32)


def gemm(a: In[f32, 2], b: In[f32, 2], c: Out[f32, 2], n: u32, k: u32, *,
         bm: int, bn: int, bk: int, tm: int, tn: int) -> None:  # fmt: skip
    """Tiles of C = A B in registers; sizes are multiples of the tile."""
    threads, columns = bm // tm * (bn // tn), bn // tn
    left, right = lang.shared(f32, bk * bm), lang.shared(f32, bk * bn)
    me = lang.local_id()
    tx, ty = me % columns, me // columns
    across = n // bn
    row0, col0 = lang.group_id() // across * bm, lang.group_id() % across * bn
    total = lang.vars(f32, tm, tn)
    for k0 in lang.range(0, k, bk):
        for at in range(0, bm * bk // 4, threads):
            r, q = (me + at) // (bk // 4), (me + at) % (bk // 4) * 4
            for j, value in enumerate(a.load(row0 + r, k0 + q)):
                left[(q + j) * bm + r] = value
        for at in range(0, bn * bk // 4, threads):
            r, q = (me + at) // (bn // 4), (me + at) % (bn // 4) * 4
            right.store(r * bn + q, b.load(k0 + r, col0 + q))
        lang.barrier()
        for kk in range(bk):
            x = [v for i in range(0, tm, 4) for v in left.load(ty * tm + kk * bm + i)]
            y = [v for j in range(tn // 4) for v in right.load(tx * 4 + kk * bn + j * columns * 4)]
            for i in range(tm):
                for j in range(tn):
                    total[i][j].set(lang.fma(x[i], y[j], total[i][j]))
        lang.barrier()
    for i in range(tm):
        for j in range(tn // 4):
            values = [total[i][4 * j + lane] for lane in range(4)]
            c.store(row0 + ty * tm + i, col0 + tx * 4 + j * columns * 4, values)


def matrix(rows: int, columns: int, *names: str) -> dict[Any, int | float]:
    """Shape and stride parameters of dense matrices."""
    given: dict[Any, int | float] = {}
    for name in names:
        given |= {(name, "stride", 0): columns, (name, "stride", 1): 1}
        given |= {(name, "shape", 0): rows, (name, "shape", 1): columns}
    return given


def tile(bm: int, bn: int, bk: int, tm: int, tn: int) -> Case:
    m, n, k = bm, bn * GROUPS, 2 * bk
    strides = matrix(m, k, "a") | matrix(k, n, "b") | matrix(m, n, "c")
    constants = {"bm": bm, "bn": bn, "bk": bk, "tm": tm, "tn": tn}
    return Case(gemm, bm // tm * (bn // tn), constants=constants,
                params={"n": n, "k": k, **strides},
                sizes={"a": m * k, "b": k * n, "c": m * n})  # fmt: skip


ALL_DTYPES = (f32, f16, bf16, i32, u32, i8, u8, bool_)
CASES: dict[str, Case] = {
    "float_arithmetic": Case(float_arithmetic, params={"s": 0.3}),
    "int_arithmetic": Case(int_arithmetic, params={"n": -5}),
    "int_by_zero": Case(int_arithmetic, params={"n": 0}),
    "uint_arithmetic": Case(uint_arithmetic),
    "bools": Case(bools),
    "conversions": Case(conversions),
    "roundings": Case(roundings),
    "strided": Case(strided, unit={"x": False, "y": False},
                    params=matrix(8, 16, "x", "y") | {("x", "stride", 1): 2, ("x", "offset"): 3}),
    "control": Case(control, workgroup=48),
    "snapshots": Case(snapshots),
    "addresses": Case(addresses, params={"pad": 4, "n": 6}),
    "branches": Case(branches, params={"n": 11}),
    "moved": Case(moved, params={"n": 3}),
    "static_shared": Case(shared_words, constants={"words": 256}),
    "dynamic_shared": Case(shared_words, constants={"words": 12544}),
    "subgroups": Case(subgroups, workgroup=64),
    "atomics": Case(atomics),
    "row_sum": Case(row_sum, workgroup=40, params=matrix(2, 70, "x")),
    "row_softmax": Case(softmax, params=matrix(2, 50, "x", "y")),
    "half_softmax": Case(softmax, 64, {"x": f16, "y": f16}, params=matrix(2, 50, "x", "y")),
    "gemm_64x64x8": tile(64, 64, 8, 8, 4),
}  # fmt: skip
for _dtype in ALL_DTYPES:
    CASES[f"moves_{_dtype.name}"] = Case(moves, dtypes=dict.fromkeys("xwyz", _dtype))

# -- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
@pytest.mark.parametrize("name", CASES)
def test_ptx_equals_the_simulator(name: str, arch: str) -> None:
    case = CASES[name]
    ir = case.trace()
    expected, params = case.launch(ir)
    got = [words.copy() for words in expected]
    simulate(ir, expected, params, GROUPS)
    execute(ir, arch, got, params, GROUPS)
    for arg, a, b in zip(ir.args, expected, got, strict=True):
        kind = np.float32 if arg.dtype is f32 else arg.dtype.numpy
        left, right = a.view(kind), b.view(kind)
        if arg.dtype is bf16:  # a NaN is a NaN
            left, right = dtypes.widen(left, bf16), dtypes.widen(right, bf16)
        np.testing.assert_array_equal(left, right, err_msg=f"{name}: {arg.name}")


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(nodes=programs(), chunked=st.booleans())
def test_random_programs(nodes: list[Node], chunked: bool) -> None:
    """Integer programs with empty loops, breaks and exchanges: equal to plain Python."""
    ir = program(nodes, chunked)
    z = first_words()
    words = np.zeros(-(-z.size // 4) * 4, np.uint32)
    words[: z.size] = z
    numbers = {**SCALARS, "z": 0}
    params = np.array([numbers[str(p.source[0])] for p in ir.params], np.uint32)
    execute(ir, "sm_80", [words], params, PROGRAM_GROUPS)
    np.testing.assert_array_equal(words[: z.size], on_host(nodes))


def test_addresses_of_an_empty_loop_are_valid_after_it() -> None:
    def after(z: InOut[u32], n: u32) -> None:
        i = lang.local_id()
        for _ in lang.range(n):
            z[i * 12] = 1
        z[i * 12 + 1] = 2

    ir = lang.trace(after, lang.signature_of(after), workgroup=4, dtypes={"z": u32})
    words = np.zeros(48, np.uint32)
    params = np.array([{"n": 0}.get(str(p.source[0]), 0) for p in ir.params], np.uint32)
    execute(ir, "sm_80", [words], params, 1)
    assert words.tolist() == [2 if k % 12 == 1 else 0 for k in range(48)]


def test_the_cases_cover_every_operation() -> None:
    seen = {s[0] for case in CASES.values() for s in case.trace().body}
    rest = {"const", "var", "get", "set", "barrier", "workgroup_uniform"}
    every = PURE | CONTROL | ACCESSES | SUBGROUP | rest
    assert seen == every - PTX_ONLY  # which `test_lang_tiles` has cases of


@needs_ptxas
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_every_kernel_assembles(name: str, arch: str, tmp_path: Path) -> None:
    report, _ = assemble(emit_ptx(CASES[name].trace(), arch), arch, tmp_path)
    assert resources(report)[1] == 0, report


@needs_ptxas
@pytest.mark.parametrize("arch", TARGETS)
def test_the_version_is_the_lowest_that_knows_the_target(arch: str, tmp_path: Path) -> None:
    text = emit_ptx(CASES["float_arithmetic"].trace(), arch)
    if int(re.sub(r"\D", "", arch)) < 75:
        pytest.skip("the ptxas of CUDA 13 begins at sm_75")
    assemble(text, arch, tmp_path)
    major, minor = map(int, TARGETS[arch].split("."))
    before = f"{major}.{minor - 1}" if minor else {7: "6.5", 8: "7.8", 9: "8.8"}[major]
    lower = text.replace(f".version {TARGETS[arch]}", f".version {before}")
    with pytest.raises(AssertionError, match=r"version|target"):
        assemble(lower, arch, tmp_path)


@needs_ptxas
@pytest.mark.parametrize("arch", ARCHS[1:])
@pytest.mark.parametrize(
    ("sizes", "most"), [((64, 64, 8, 8, 4), 80), ((128, 128, 8, 8, 8), 128)], ids=["64", "128"]
)
def test_gemm_tiles_stay_in_registers(
    sizes: tuple[int, ...], most: int, arch: str, tmp_path: Path
) -> None:
    text = emit_ptx(tile(*sizes).trace(), arch)
    report, cubin = assemble(text, arch, tmp_path, write=True)
    registers, stack = resources(report)
    assert stack == 0, report
    assert registers <= most, report
    if NVDISASM is None:
        pytest.skip("registers checked; no nvdisasm to look at the loads")
    sass = subprocess.run([NVDISASM, "-c", str(cubin)], capture_output=True, text=True, check=True)
    _, _, bk, tm, tn = sizes
    assert sass.stdout.count("LDS.128") == bk * (tm + tn) // 4
    assert sass.stdout.count("FFMA") >= bk * tm * tn
    assert not re.search(r"\b(LDL|STL)\b", sass.stdout)


def test_gemm_inner_loop_has_one_address_a_matrix() -> None:
    text = emit_ptx(tile(128, 128, 8, 8, 8).trace())
    loop = text[text.index("// for") : text.rindex("bar.sync")]
    inner = loop[loop.index("bar.sync") :]
    assert inner.count("fma.rn.f32") == 512
    assert inner.count("ld.shared.v4") == 32
    assert inner.count("mad.lo.u32") <= 2
    assert len(inner.strip().splitlines()) <= 1 + 512 + 32 + 2 * 4


def lines(fn: Callable[..., Any], arch: str = "sm_80", **given: Any) -> str:
    return emit_ptx(Case(fn, **given).trace(), arch)


def test_products_are_never_contracted() -> None:
    def fn(x: In[f32], y: Out[f32]) -> None:
        i = lang.local_id()
        a, b, c = x[i], x[i + 1], x[i + 2]
        y[i] = a * b + c

    text = lines(fn)
    assert re.search(r"mul\.rn\.f32 (%f\d+), %f\d+, %f\d+;\n  add\.rn\.f32 %f\d+, \1", text)
    assert "fma" not in text
    assert "mad.f32" not in text
    assert ".ftz" not in text
    assert "approx" not in text


def test_neighbouring_loads_share_an_address() -> None:
    def fn(x: In[f32], y: Out[f32]) -> None:
        i = lang.local_id()
        y[i] = x[i] + x[i + 1] + x[i + 2] + x[4 + i - 1]

    text = lines(fn)
    assert text.count("mad.wide.u32") == 2
    for offset in ("]", "+4]", "+8]", "+12]"):
        assert len(re.findall(rf"ld\.global\.nc\.f32 %f\d+, \[%rd0{re.escape(offset)}", text)) == 1


def test_a_sum_that_may_pass_below_zero_is_not_folded() -> None:
    def fn(x: In[f32], y: Out[f32], pad: u32) -> None:
        i = lang.local_id()
        y[i] = x[i - pad + 3]

    assert re.search(r"ld\.global\.nc\.f32 %f\d+, \[%rd\d+\];", lines(fn))


def test_read_only_arguments_take_the_read_only_path() -> None:
    def fn(x: In[f32], p: Scalar[f32], z: InOut[f32]) -> None:
        i = lang.local_id()
        z[i] = z[i] + x[i] * p.value

    text = lines(fn)
    assert text.count("ld.global.nc.f32") == 2
    assert len(re.findall(r"ld\.global\.f32", text)) == 1


def test_what_is_read_behind_a_wait_of_its_own_does_not_take_the_read_only_path() -> None:
    """The assembler moves such loads across the wait, before the launch before is over."""

    def late(x: In[f32], y: Out[f32]) -> None:
        lang.ptx.await_launches()
        y[lang.local_id()] = x[lang.local_id()]

    def early(x: In[f32], w: In[f32], y: Out[f32]) -> None:
        weight = w[lang.local_id()]
        lang.ptx.await_launches()
        y[lang.local_id()] = x[lang.local_id()] * weight

    assert "ld.global.nc" not in lines(late, "sm_90")
    text = lines(early, "sm_90")
    assert text.count("ld.global.nc.f32") == 1 and text.count("ld.global.f32") == 1


@pytest.mark.parametrize(("divisor", "guards"), [(7, 0), (0, 0), (None, 1)])
def test_division_is_guarded_unless_the_divisor_is_known(divisor: int | None, guards: int) -> None:
    def fn(x: In[i32], y: Out[i32], n: i32) -> None:
        i = lang.local_id()
        by = n if divisor is None else divisor
        y[i] = x[i] // by + x[i] % by

    text = lines(fn)
    assert len(re.findall(r"setp\.eq\.s32 %p\d+, %r\d+, 0;", text)) == guards
    assert text.count("div.s32") == (divisor != 0)


@pytest.mark.parametrize(
    ("arch", "line"),
    [("sm_75", "setp.nan.f32"), ("sm_80", "max.NaN.f32"), ("sm_90a", "max.NaN.f32")],
)
def test_maximum_propagates_nan(arch: str, line: str) -> None:
    assert line in emit_ptx(CASES["float_arithmetic"].trace(), arch)


def test_loops_test_at_the_bottom() -> None:
    def fn(x: In[f32], y: Out[f32], n: u32) -> None:
        total = lang.var(0.0)
        for k in lang.range(n):
            total += x[k]
        y[lang.local_id()] = total

    expected = """\
  ld.param.b32 %r2, [params+24];
  mov.b32 %r1, 0;
  setp.ge.u32 %p0, %r1, %r0;
  @%p0 bra L5_end;
L5:  // for %r1 < %r0
  add.u32 %r3, %r2, %r1;
  mad.wide.u32 %rd0, %r3, 4, %base0;
  ld.global.nc.f32 %f1, [%rd0];
  add.rn.f32 %f0, %f0, %f1;
  add.u32 %r1, %r1, 1;
  setp.lt.u32 %p1, %r1, %r0;
  @%p1 bra L5;
L5_end:
"""
    assert expected in lines(fn)


def test_at_most_so_many_values_move_before_a_loop() -> None:
    def fn(x: In[f32], y: Out[f32], n: u32) -> None:
        i, total = lang.local_id(), lang.var(0.0)
        for _ in lang.range(n):
            for j in range(100):
                total += x[i ^ (j + 1)]
        y[i] = total

    before, _, inside = lines(fn).partition("// for")
    assert 0 < before.count("xor.b32") < ROOM
    assert before.count("xor.b32") + inside.count("xor.b32") == 100


def test_nothing_moves_out_of_a_branch() -> None:
    def fn(x: In[f32], y: Out[f32], n: u32) -> None:
        i, total = lang.local_id(), lang.var(0.0)
        for k in lang.range(n):
            with lang.if_(k == i):
                total += x[i * 7]
        y[i] = total

    text = lines(fn)
    assert text.index("// for") < text.index("@!%p") < text.index("mul.lo.u32")


def test_the_head_says_how_to_launch() -> None:
    ir = CASES["float_arithmetic"].trace()
    text = emit_ptx(ir, "sm_90a")
    head = [".version 8.0", ".target sm_90a", ".address_size 64"]
    assert text.splitlines()[:3] == head
    assert ".visible .entry float_arithmetic(\n  .param .align 8 .b8 params[32]\n)" in text
    assert "\n.reqntid 32, 1, 1\n" in text
    assert "  setp.ge.u32 %past, %group, %groups;\n  @%past ret;\n" in text


@pytest.mark.parametrize(("arch", "waits"), [("sm_80", False), ("sm_90", True), ("sm_120a", True)])
def test_every_block_waits_for_the_launch_before(arch: str, waits: bool) -> None:
    text = emit_ptx(CASES["float_arithmetic"].trace(), arch)
    assert ("griddepcontrol" in text) == waits
    if waits:  # before anything is read, and before a block past the launch ends
        body = text.partition("griddepcontrol.wait;")
        assert not re.search(r"ld\.|st\.|ret|bra", body[0].partition("{")[2])


def test_layouts_of_parameters_and_shared_memory() -> None:
    layout = param_layout(CASES["conversions"].trace())
    assert layout.pointers == (0, 8, 16)
    assert layout.groups == 24
    assert layout.scalars == (28, 32, 36)
    assert layout.size == 40
    static = shared_layout(CASES["static_shared"].trace())
    assert static.offsets == (0, 1024)
    assert (static.uniform, static.size, static.dynamic) == (1168, 1184, 0)
    large = CASES["dynamic_shared"].trace()
    assert shared_layout(large).dynamic == shared_layout(large).size > 48 * 1024
    assert ".extern .shared .align 16 .b8 $smem[];" in emit_ptx(large)


@pytest.mark.parametrize(
    ("name", "entry"),
    [("scale", "scale"), ("<lambda>", "k_lambda_"), ("_x", "k_x"), ("8bit", "k8bit"),
     ("größe", "gr__e"), ("", "k")],
)  # fmt: skip
def test_entry_names_are_identifiers(name: str, entry: str) -> None:
    ir = replace(CASES["bools"].trace(), name=name)
    assert entry_name(ir) == entry
    assert f".visible .entry {entry}(" in emit_ptx(ir)
    assert emit_ptx(ir).isascii()


@pytest.mark.parametrize(
    ("value", "type_", "text"),
    [(1.0, "f32", "0f3F800000"), (-0.0, "f32", "0f80000000"), (float("inf"), "f32", "0f7F800000"),
     (float("nan"), "f32", "0f7FC00000"), (1e39, "f32", "0f7F800000"), (-1e39, "f32", "0fFF800000"),
     (-5, "i32", "-5"), (2**32 - 1, "u32", "4294967295"), (True, "bool", "%true")],
)  # fmt: skip
def test_literals(value: Any, type_: str, text: str) -> None:
    assert literal(value, type_) == text


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"no PTX target 'sm_20'; expected one of .*sm_80"):
        emit_ptx(CASES["bools"].trace(), "sm_20")


def test_an_unknown_operation_is_refused() -> None:
    ir = CASES["snapshots"].trace()
    body = (*ir.body, ("teleport", "", (), None))
    with pytest.raises(TraceError, match="PTX has no teleport"):
        emit_ptx(replace(ir, body=body))


@pytest.mark.parametrize("workgroup", [16, 48])
def test_subgroup_operations_need_whole_subgroups(workgroup: int) -> None:
    ir = replace(CASES["subgroups"].trace(), workgroup=workgroup)
    with pytest.raises(TraceError, match=f"multiple of 32 threads, got {workgroup}"):
        emit_ptx(ir)


PROGRAM = """
import functools
import hashlib
from tests.emit.test_lang_ptx import CASES, emit_ptx
texts = "".join(emit_ptx(case.trace()) for case in CASES.values())
print(hashlib.sha256(texts.encode()).hexdigest())
"""


def test_the_text_is_the_same_in_every_process() -> None:
    texts = "".join(emit_ptx(case.trace()) for case in CASES.values())
    again = "".join(emit_ptx(case.trace()) for case in CASES.values())
    assert texts == again
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == hashlib.sha256(texts.encode()).hexdigest()
