"""PTX in tables: targets, types, the instruction of each operation and type; immediates."""

from __future__ import annotations

import re
import struct
from typing import Any

# Target: the lowest PTX version that knows it and shfl.sync (6.0), with all that is used here.
TARGETS = {
    "sm_50": "6.0", "sm_52": "6.0", "sm_53": "6.0", "sm_60": "6.0", "sm_61": "6.0", "sm_62": "6.0",
    "sm_70": "6.0", "sm_72": "6.1", "sm_75": "6.3", "sm_80": "7.0", "sm_86": "7.1", "sm_87": "7.4",
    "sm_88": "9.0", "sm_89": "7.8", "sm_90": "7.8", "sm_90a": "8.0", "sm_100": "8.6",
    "sm_100a": "8.6", "sm_103": "8.8", "sm_103a": "8.8", "sm_110": "9.0", "sm_110a": "9.0",
    "sm_120": "8.7", "sm_120a": "8.7", "sm_121": "8.8", "sm_121a": "8.8",
}  # fmt: skip
SUBGROUP_SIZE = 32


def number_of(arch: str) -> int:
    """A target's number: 90 of sm_90a."""
    return int(re.sub(r"\D", "", arch))


def overlaps(arch: str) -> bool:
    """Whether a launch of this target may begin before the one before it is quite over.

    Its kernels then wait for that one's end themselves, before anything else (PTX ISA 9.7.13.13,
    `griddepcontrol`).
    """
    return number_of(arch) >= 90


# Value type: its registers, and its name in moves and memory accesses.
TYPES = {"f32": ("%f", "f32"), "i32": ("%r", "b32"), "u32": ("%r", "b32"), "bool": ("%p", "pred")}
REGISTERS = {"%f": "f32", "%r": "b32", "%p": "pred", "%rd": "b64", "%h": "b16"}

# Operation: its instruction for operands of each type. "" is a rule of its own, or a type error.
_TABLE = {
    #         f32                i32            u32            bool
    "neg":   ("neg.f32",         "neg.s32",     "neg.s32",     ""),
    "abs":   ("abs.f32",         "abs.s32",     "",            ""),
    "floor": ("cvt.rmi.f32.f32", "",            "",            ""),
    "ceil":  ("cvt.rpi.f32.f32", "",            "",            ""),
    "trunc": ("cvt.rzi.f32.f32", "",            "",            ""),
    "sqrt":  ("sqrt.rn.f32",     "",            "",            ""),
    "ex2":   ("ex2.approx.ftz.f32", "",         "",            ""),
    "rsqrt": ("rsqrt.approx.f32", "",           "",            ""),
    "rcp":   ("rcp.approx.f32",  "",            "",            ""),
    "not":   ("",                "not.b32",     "not.b32",     "not.pred"),
    "add":   ("add.rn.f32",      "add.s32",     "add.u32",     ""),
    "sub":   ("sub.rn.f32",      "sub.s32",     "sub.u32",     ""),
    "mul":   ("mul.rn.f32",      "mul.lo.s32",  "mul.lo.u32",  ""),
    "div":   ("div.rn.f32",      "",            "",            ""),
    "fma":   ("fma.rn.f32",      "",            "",            ""),
    "and":   ("",                "and.b32",     "and.b32",     "and.pred"),
    "or":    ("",                "or.b32",      "or.b32",      "or.pred"),
    "xor":   ("",                "xor.b32",     "xor.b32",     "xor.pred"),
    "min":   ("min.f32",         "min.s32",     "min.u32",     ""),
    "max":   ("max.f32",         "max.s32",     "max.u32",     ""),
    "minn":  ("min.NaN.f32",     "min.s32",     "min.u32",     ""),
    "maxn":  ("max.NaN.f32",     "max.s32",     "max.u32",     ""),
    "max_f16":  ("",             "",            "max.NaN.f16x2", ""),
    "max_bf16": ("",             "",            "max.NaN.bf16x2", ""),
    "lt":    ("setp.lt.f32",     "setp.lt.s32", "setp.lt.u32", ""),
    "le":    ("setp.le.f32",     "setp.le.s32", "setp.le.u32", ""),
    "gt":    ("setp.gt.f32",     "setp.gt.s32", "setp.gt.u32", ""),
    "ge":    ("setp.ge.f32",     "setp.ge.s32", "setp.ge.u32", ""),
    "eq":    ("setp.eq.f32",     "setp.eq.s32", "setp.eq.u32", ""),
    "ne":    ("setp.neu.f32",    "setp.ne.s32", "setp.ne.u32", "xor.pred"),
}  # fmt: skip
INSTRUCTIONS = {
    (op, type_): text
    for op, row in _TABLE.items()
    for type_, text in zip(("f32", "i32", "u32", "bool"), row, strict=True)
    if text
}
CASTS = {  # float to int clamps, and NaN gives 0: PTX's cvt
    ("f32", "i32"): "cvt.rzi.s32.f32 {d}, {a};", ("f32", "u32"): "cvt.rzi.u32.f32 {d}, {a};",
    ("i32", "f32"): "cvt.rn.f32.s32 {d}, {a};", ("u32", "f32"): "cvt.rn.f32.u32 {d}, {a};",
    ("bool", "f32"): "selp.f32 {d}, 0f3F800000, 0f00000000, {a};",
    ("bool", "i32"): "selp.b32 {d}, 1, 0, {a};", ("bool", "u32"): "selp.b32 {d}, 1, 0, {a};",
    ("f32", "bool"): "setp.neu.f32 {d}, {a}, 0f00000000;",
    ("i32", "bool"): "setp.ne.s32 {d}, {a}, 0;", ("u32", "bool"): "setp.ne.u32 {d}, {a}, 0;",
}  # fmt: skip
SIGNED = {"i32": "s32", "u32": "u32"}
# Operations that are one line: `{d}` is the result's register, `{n}` the attribute.
LINES = {
    "thread": "mov.u32 {d}, %tid.x;", "lane": "mov.u32 {d}, %laneid;",
    "grid": "mov.u32 {d}, %nctaid.x;", "cluster_rank": "mov.u32 {d}, %cluster_ctarank;",
    "barrier": "bar.sync 0;",  # which also orders memory accesses
    "cp_async_commit": "cp.async.commit_group;", "cp_async_wait": "cp.async.wait_group {n};",
    "launch_dependents": "griddepcontrol.launch_dependents;",
    "await_launches": "griddepcontrol.wait;",
    "cluster_wait": "barrier.cluster.wait.aligned;",
    "mbar_fence": "fence.mbarrier_init.release.cluster;",
    "async_fence": "fence.proxy.async.shared::cta;",
    "tma_store_commit": "cp.async.bulk.commit_group;",
    "tma_store_wait": "cp.async.bulk.wait_group.read {n};",
    "wgmma_fence": "wgmma.fence.sync.aligned;", "wgmma_commit": "wgmma.commit_group.sync.aligned;",
    "wgmma_wait": "wgmma.wait_group.sync.aligned {n};",
}  # fmt: skip  # a table
# Relaxed, seen by the whole device: what `atom` and `red` are where the text says no more.
ATOMIC = {
    "add": "add.u32", "min": "min.{}", "max": "max.{}", "and": "and.b32", "or": "or.b32",
    "xor": "xor.b32", "exchange": "exch.b32", "compare_exchange": "cas.b32",
}  # fmt: skip
NO_RED = ("exchange", "compare_exchange")  # `red` is `atom` without a result


def literal(value: Any, type_: str) -> str:
    """An immediate of a value type; bools are two predicate registers."""
    if type_ == "bool":
        return "%true" if value else "%false"
    if type_ != "f32":
        return str(value)
    try:
        return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"
    except OverflowError:  # past the largest f32
        return "0fFF800000" if value < 0 else "0f7F800000"
