"""Values as WGSL expressions: literals, operators, calls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from centella.emit.wgsl.writer import Rule, Writer
from centella.errors import TraceError
from centella.lang.ir import PURE
from centella.lang.structure import Statement

BINARY = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%", "and": "&", "or": "|", "xor": "^",
    "shl": "<<", "shr": ">>", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
CALL = {
    "abs": "abs", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "sqrt": "sqrt",
    "min": "min", "max": "max", "minn": "min_nan", "maxn": "max_nan", "fma": "fma",
    "pack_f16": "pack_f16", "pack_bf16": "pack_bf16", "ex2": "exp2",
}  # fmt: skip
IDS = {
    "thread": "thread", "group": "group", "groups": "params.v[0].x", "lane": "lane",
    "subgroup_size": "lanes",
}  # fmt: skip
LANES = "xyzw"
# Float operations that drivers rewrite, where they may. The group's third number, which is 0 in
# every launch, keeps them from it: results have its bits added, so that no rule reaches past one,
# and so has the first of two operands, which may be equal.
REWRITTEN = frozenset({"add", "sub", "mul", "div", "sqrt", "fma", "ex2"})
SUMS = frozenset({"add"})  # a sum in another order has another rounding
LARGEST = float(np.finfo(np.float32).max)


def literal(value: Any, type_: str) -> str:
    """A WGSL literal of a value type."""
    if type_ == "bool":
        return "true" if value else "false"
    if type_ == "u32":
        return f"{value}u"
    if type_ == "i32":
        return "bitcast<i32>(0x80000000u)" if value == -(2**31) else f"i32({value})"
    if not math.isfinite(value):
        return bits_literal(value)
    text = str(np.float32(value))
    if abs(float(text)) > LARGEST:  # the short form of the largest f32 is above it
        text = repr(math.copysign(LARGEST, value))
    return f"({text}f)" if text.startswith("-") else f"{text}f"


def bits_literal(value: float) -> str:
    """An f32 that no compiler sees as a constant: WGSL refuses infinities and NaN."""
    return f"bitcast<f32>(zero_bits | {int(np.float32(value).view(np.uint32)):#x}u)"


# -- values that are a name or a number ------------------------------------------------------------


def _const(w: Writer, i: int, statement: Statement) -> None:
    w.text[i] = literal(statement[3], statement[1])


def _param(w: Writer, i: int, statement: Statement) -> None:
    """A launch parameter; the first word is the number of groups."""
    slot = statement[3] + 1
    word = f"params.v[{slot // 4}].{LANES[slot % 4]}"
    w.text[i] = word if statement[1] == "u32" else f"bitcast<{statement[1]}>({word})"


def _identity(w: Writer, i: int, statement: Statement) -> None:
    w.text[i] = IDS[statement[0]]


def _extract(w: Writer, i: int, statement: Statement) -> None:
    w.text[i] = f"{w.read(statement[2][0])}.{LANES[statement[3]]}"


# -- operations ------------------------------------------------------------------------------------


def _pure(w: Writer, i: int, statement: Statement) -> None:
    args = statement[2]
    reads = w.reads_of(args)
    w.value(i, _expression(w, statement, [w.read(a) for a in args]), args, reads)


def _expression(w: Writer, statement: Statement, texts: list[str]) -> str:
    op, type_, args, _ = statement
    if type_ != "f32" or op not in w.settled:
        return _plain(w, statement, texts)
    texts = [_unknown_zero(w, a, text) for a, text in zip(args, texts, strict=True)]
    if op in ("add", "sub", "div") and w.ir.body[args[0]][0] != "const":
        w.need("apart")
        texts[0] = f"apart({texts[0]}, wid.z)"
    if op == "fma":  # only another one with a factor of its own would be joined with it
        body = w.ir.body
        inner = body[args[2]]
        if inner[0] == "fma" and any(body[a] == body[b] for a in args[:2] for b in inner[2][:2]):
            w.need("settled")
            texts[2] = f"settled({texts[2]}, wid.z)"
        return _plain(w, statement, texts)
    w.need("settled")
    return f"settled({_plain(w, statement, texts)}, wid.z)"


def _unknown_zero(w: Writer, index: int, text: str) -> str:
    """An operand: a 0 as one that no driver knows."""
    op, _, _, value = w.ir.body[index]
    if op != "const" or value != 0:
        return text
    return f"bitcast<f32>(wid.z{' | 0x80000000u' if math.copysign(1, value) < 0 else ''})"


def _plain(w: Writer, statement: Statement, texts: list[str]) -> str:
    op, type_, args, attr = statement
    if op in BINARY:
        return _operator(w, statement, *texts)
    if op in CALL:
        name = "pack_f16_native" if op == "pack_f16" and w.native_f16 else CALL[op]
        w.need(name)
        call = f"{name}({', '.join(texts)})"
        return f"({call} | wid.z)" if name == "pack_f16_native" and args in w.rounded else call
    if op == "neg":
        return f"(0u - {texts[0]})" if type_ == "u32" else f"(-{texts[0]})"
    if op == "not":
        return f"(!{texts[0]})" if type_ == "bool" else f"(~{texts[0]})"
    if op == "select":
        return f"select({texts[2]}, {texts[1]}, {texts[0]})"
    if op == "unpack_f16":
        return f"unpack2x16float({texts[0]}).{LANES[attr]}"
    source = w.ir.body[args[0]]
    if op == "bitcast":
        if source[0] == "const":  # the bits of a NaN
            return f"bitcast<f32>(zero_bits | bitcast<u32>({texts[0]}))"
        return f"bitcast<{type_}>({texts[0]})"
    if op == "cast":
        if source[1] == "f32":
            w.need(f"to_{type_}")
            return f"to_{type_}({texts[0]})"
        return f"{type_}({texts[0]})"
    raise TraceError(f"WGSL has no {op}")


def _operator(w: Writer, statement: Statement, left: str, right: str) -> str:
    op, type_, (_, b), _ = statement
    if op in ("shl", "shr") and _most(w, b) > 31:
        right = f"({right} & 31u)"
    if op == "div" and w.ir.body[b][0] == "const" and w.ir.body[b][3] == 0:
        op = "mul"  # compilers get a quotient by a known 0 wrong
        right = bits_literal(math.copysign(math.inf, w.ir.body[b][3]))
    if op == "xor" and type_ == "bool":
        op = "ne"
    if op == "rem" and type_ == "i32":  # of negative numbers Vulkan leaves it undefined
        w.need("rem_i32")
        return f"rem_i32({left}, {right})"
    return f"({left} {BINARY[op]} {right})"


def _most(w: Writer, index: int) -> int:
    """An upper bound of a u32: of a constant, a masked value, or either times a constant."""
    op, _, args, value = w.ir.body[index]
    if op == "const":
        return int(value)
    if op == "and":
        return min(_most(w, a) for a in args)
    if op == "mul" and all(w.ir.body[a][0] in ("const", "and") for a in args):
        return math.prod(_most(w, a) for a in args)
    return 2**32 - 1


RULES: dict[str, Rule] = {
    **dict.fromkeys(PURE, _pure), **dict.fromkeys(IDS, _identity),
    "const": _const, "param": _param, "extract": _extract,
}  # fmt: skip  # a table
