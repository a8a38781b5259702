"""Values that need more than one instruction, or none: ids, conversions, division, packing."""

from __future__ import annotations

from centella.emit.ptx.facts import same_register
from centella.emit.ptx.tables import CASTS, SIGNED, SUBGROUP_SIZE, literal
from centella.emit.ptx.writer import Rule, Writer, braced
from centella.lang.structure import Statement

FIXED = {"group": "%group", "groups": "%groups", "subgroup_size": str(SUBGROUP_SIZE)}


def _const(w: Writer, i: int, statement: Statement) -> None:
    name = w.values[i] = literal(statement[3], statement[1])
    if statement[1] == "bool":
        w.fixed_register(name, "pred", f"mov.pred {name}, {int(statement[3])};")


def _param(w: Writer, i: int, statement: Statement) -> None:
    offset = w.params.scalars[statement[3]]
    w.emit(f"ld.param.{w.kind(i)} {w.result(i)}, [params+{offset}];")


def _identity(w: Writer, i: int, statement: Statement) -> None:
    """What the prologue has in a register, or a number."""
    w.values[i] = FIXED[statement[0]]


def _convert(w: Writer, i: int, statement: Statement) -> None:
    op, type_, (a,), _ = statement
    value, source = w.values[a], w.ir.body[a][1]
    if same_register(w.ir.body, statement):
        w.values[i] = value
    elif op == "bitcast":
        w.emit(f"mov.b32 {w.result(i)}, {value};")
    else:
        w.emit(CASTS[source, type_].format(d=w.result(i), a=value))


def _divide(w: Writer, i: int, statement: Statement) -> None:
    """Integer quotient and remainder: x // 0 is x, x % 0 is 0."""
    op, type_, (a, b), _ = statement
    x, y, kind = w.values[a], w.values[b], SIGNED[type_]
    divisor = w.ir.body[b]
    if divisor[0] == "const":
        text = f"{op}.{kind} {{}}, {x}, {y};"
        if divisor[3] == 0:
            text = f"mov.b32 {{}}, {x if op == 'div' else 0};"
        w.emit(text.format(w.result(i)))
        return
    zero = w.once(("zero", b), "%p", f"setp.eq.{kind} {{}}, {y}, 0;", (b,))
    quotient = w.new("%r")
    w.emit(f"{op}.{kind} {quotient}, {x}, {y};")
    w.emit(f"selp.b32 {w.result(i)}, {x if op == 'div' else 0}, {quotient}, {zero};")


def _shift(w: Writer, i: int, statement: Statement) -> None:
    """Shifts by the amount modulo 32 (PTX clamps instead)."""
    op, type_, (a, b), _ = statement
    amount = w.values[b]
    if w.ir.body[b][0] == "const":
        amount = str(int(amount) & 31)
    else:
        amount = w.once(("mask", b), "%r", f"and.b32 {{}}, {amount}, 31;", (b,))
    name = "shl.b32" if op == "shl" else f"shr.{SIGNED[type_]}"
    w.emit(f"{name} {w.result(i)}, {w.values[a]}, {amount};")


def _nan_extreme(w: Writer, i: int, statement: Statement) -> None:
    """maxn and minn before sm_80, which lack max.NaN."""
    a, b = (w.values[x] for x in statement[2])
    nan, extreme = w.new("%p"), w.new("%f")
    w.emit(f"setp.nan.f32 {nan}, {a}, {b};")
    w.emit(f"{statement[0][:3]}.f32 {extreme}, {a}, {b};")
    w.emit(f"selp.f32 {w.result(i)}, 0f7FC00000, {extreme}, {nan};")


def _select(w: Writer, i: int, statement: Statement) -> None:
    """Choice; of bools by (c & (a ^ b)) ^ b."""
    _, type_, args, _ = statement
    c, a, b = (w.values[x] for x in args)
    if type_ != "bool":
        w.emit(f"selp.{w.kind(i)} {w.result(i)}, {a}, {b}, {c};")
        return
    t, u = w.new("%p"), w.new("%p")
    w.emit(f"xor.pred {t}, {a}, {b};")
    w.emit(f"and.pred {u}, {t}, {c};")
    w.emit(f"xor.pred {w.result(i)}, {u}, {b};")


def _equal(w: Writer, i: int, statement: Statement) -> None:
    t = w.new("%p")
    w.emit(f"xor.pred {t}, {w.values[statement[2][0]]}, {w.values[statement[2][1]]};")
    w.emit(f"not.pred {w.result(i)}, {t};")


def _unpack_f16(w: Writer, i: int, statement: Statement) -> None:
    word = statement[2][0]
    halves = w.known.get(("halves", word))
    if halves is None:
        halves = w.remember(("halves", word), (w.new("%h"), w.new("%h")))
        w.emit(f"mov.b32 {braced(halves)}, {w.in_register(word)};")
    w.emit(f"cvt.f32.f16 {w.result(i)}, {halves[statement[3]]};")


def _pack(w: Writer, i: int, statement: Statement) -> None:
    """Two f32 as a word of f16 or bf16, to nearest even; NaN stays NaN."""
    lo, hi = (w.in_register(a) for a in statement[2])
    kind = statement[0][5:]
    if w.ampere:
        w.emit(f"cvt.rn.{kind}x2.f32 {w.result(i)}, {hi}, {lo};")
    elif kind == "f16":
        a, b = w.new("%h"), w.new("%h")
        w.emit(f"cvt.rn.f16.f32 {a}, {lo};")
        w.emit(f"cvt.rn.f16.f32 {b}, {hi};")
        w.emit(f"mov.b32 {w.result(i)}, {{{a}, {b}}};")
    else:
        low, high = _bf16_bits(w, lo), _bf16_bits(w, hi)
        w.emit(f"prmt.b32 {w.result(i)}, {low}, {high}, 0x7632;")


def _bf16_bits(w: Writer, value: str) -> str:
    """A register whose upper half is an f32 rounded to bf16."""
    bits, odd, sum_, rounded, quiet, chosen = (w.new("%r") for _ in range(6))
    nan = w.new("%p")
    w.emit(f"mov.b32 {bits}, {value};")
    w.emit(f"bfe.u32 {odd}, {bits}, 16, 1;")
    w.emit(f"add.u32 {sum_}, {bits}, {odd};")
    w.emit(f"add.u32 {rounded}, {sum_}, 32767;")
    w.emit(f"or.b32 {quiet}, {bits}, 4194304;")
    w.emit(f"setp.nan.f32 {nan}, {value}, {value};")
    w.emit(f"selp.b32 {chosen}, {quiet}, {rounded}, {nan};")
    return chosen


def _widen_i8(w: Writer, i: int, statement: Statement) -> None:
    """Two bytes of a word as f16 or bf16, exactly.

    f16: b + 128 in the last bits of 1024, less 1152. bf16, whose 128 has 7 bits to spare: the low 7
    of b as 128 + low, less 128, or less 256 where b is negative (0xC380 is -256). What is taken
    away has the bits of b that the first has not: one operation of both, without a mask.
    """
    (word,), (kind, half) = statement[2], statement[3]
    source = w.in_register(word)
    if kind == "f16":
        positive = w.once(("positive", word), "%r", f"xor.b32 {{}}, {source}, 0x80808080;", (word,))
        bytes_ = w.new("%r")
        w.emit(f"prmt.b32 {bytes_}, {positive}, 0x64646464, {'0x4342' if half else '0x4140'};")
        offset = w.fixed_register("%offset", "b32", "mov.b32 %offset, 0x64806480;")
        w.emit(f"sub.rn.f16x2 {w.result(i)}, {bytes_}, {offset};")
        return
    bytes_, low, left, less, more = (w.new("%r") for _ in range(5))
    w.emit(f"prmt.b32 {bytes_}, {source}, 0, {'0x4342' if half else '0x4140'};")
    w.emit(f"and.b32 {low}, {bytes_}, 0x007F007F;")
    w.emit(f"or.b32 {more}, {low}, 0x43004300;")
    w.emit(f"xor.b32 {left}, {bytes_}, {more};")
    w.emit(f"xor.b32 {less}, {left}, 0x80008000;")
    one = w.fixed_register("%one", "b32", "mov.b32 %one, 0x3F803F80;")
    w.emit(f"fma.rn.bf16x2 {w.result(i)}, {more}, {one}, {less};")


def _widen_u7(w: Writer, i: int, statement: Statement) -> None:
    """Two bytes below 128 as f16 or bf16: in the last bits of 1024 or 128, less that and `zero`."""
    (word,), (kind, half, zero) = statement[2], statement[3]
    high, first = ("0x64646464", 0x6400) if kind == "f16" else ("0x43434343", 0xC300)
    bits = (first + zero) * 0x10001  # of 1024 + zero, of -128 - zero
    bytes_, selector = w.new("%r"), "0x4342" if half else "0x4140"
    w.emit(f"prmt.b32 {bytes_}, {w.in_register(word)}, {high}, {selector};")
    name = f"%zero_{kind}_{zero}"
    less = w.fixed_register(name, "b32", f"mov.b32 {name}, {bits:#010x};")
    if kind == "f16":
        w.emit(f"sub.rn.f16x2 {w.result(i)}, {bytes_}, {less};")
        return
    one = w.fixed_register("%one", "b32", "mov.b32 %one, 0x3F803F80;")
    w.emit(f"fma.rn.bf16x2 {w.result(i)}, {bytes_}, {one}, {less};")


def _permute_bytes(w: Writer, i: int, statement: Statement) -> None:
    _, _, (a, b, *given), order = statement
    operands = f"{w.in_register(a)}, {w.in_register(b)}"
    if given:
        selector = w.in_register(given[0])
    else:
        selector = f"{sum(byte << 4 * at for at, byte in enumerate(order)):#06x}"
    w.emit(f"prmt.b32 {w.result(i)}, {operands}, {selector};")


RULES: dict[str, Rule] = {
    "const": _const, "param": _param, **dict.fromkeys(FIXED, _identity), "cast": _convert,
    "bitcast": _convert, "div": _divide, "rem": _divide, "shl": _shift, "shr": _shift,
    "minn": _nan_extreme, "maxn": _nan_extreme, "select": _select, "eq": _equal,
    "unpack_f16": _unpack_f16, "pack_f16": _pack, "pack_bf16": _pack, "widen_i8": _widen_i8,
    "widen_u7": _widen_u7, "permute_bytes": _permute_bytes,
}  # fmt: skip  # a table
