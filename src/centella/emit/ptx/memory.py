"""Loads and stores: an address is a register and a constant, so that neighbours share the register.

That needs an index whose sum does not pass 2^32 on the way, as element indices never do; where a
subtraction or a signed number is part of the sum (which may pass below 0 and come back), only what
is exact modulo 2^32 is folded.
"""

from __future__ import annotations

from centella.emit.ptx.facts import MAX_FOLDED, Term, Terms, leaves
from centella.emit.ptx.tables import ATOMIC, NO_RED, SIGNED, TYPES
from centella.emit.ptx.writer import Rule, Writer, braced
from centella.lang.ir import GLOBAL_ATOMICS, SHARED, SHARED_ATOMICS
from centella.lang.structure import Statement


def _term(w: Writer, term: Term) -> str:
    """The register of one term of an index."""
    if isinstance(term, int):
        return w.values[term]
    op, inner, number = term
    name = "mul.lo.u32" if op == "mul" else "shr.u32"
    text = f"{name} {{}}, {total(w, inner)}, {number};"
    return w.once(term, "%r", text, leaves(inner))


def total(w: Writer, terms: Terms) -> str:
    """The register of a sum of terms."""
    register = _term(w, terms[0])
    for n in range(2, len(terms) + 1):
        text = f"add.u32 {{}}, {register}, {_term(w, terms[n - 1])};"
        register = w.once(("sum", terms[:n]), "%r", text, leaves(terms[:n]))
    return register


def _address(w: Writer, statement: Statement) -> str:
    op, _, (index, *_), position = statement
    return address(w, index, position, op in SHARED, 16 if op[-1] == "4" else 4)


def address(
    w: Writer, index: int, position: int, shared: bool, scale: int, rank: int | None = None
) -> str:
    """`[register+bytes]` of the element `index`, of `scale` bytes, of an array or argument.

    Args:
        rank: whose array it is, of the groups of the cluster; None: this group's.
    """
    terms, constant = w.facts.sums.get(index) or ((index,), 0)
    if w.ir.body[index][0] == "const" and w.ir.body[index][3] < MAX_FOLDED:
        terms, constant = (), w.ir.body[index][3]
    offset = constant * scale
    also = () if rank is None else (rank,)
    if shared:
        base, add, prefix = w.smem(), "mad.lo.u32", "%r"
        if rank is not None:
            text = f"mapa.shared::cluster.u32 {{}}, {base}, {w.values[rank]};"
            base = w.once(("mapa", rank), "%r", text, also)
        offset += w.shared.offsets[position]
    else:
        base, add, prefix = _base(w, position), "mad.wide.u32", "%rd"
    if terms:
        text = f"{add} {{}}, {total(w, terms)}, {scale}, {base};"
        base = w.once((base, terms, scale), prefix, text, (*leaves(terms), *also))
    return f"[{base}+{offset}]" if offset else f"[{base}]"


def _base(w: Writer, position: int) -> str:
    """The global address of an argument."""
    name = f"%base{position}"
    text = f"ld.param.b64 {name}, [params+{w.params.pointers[position]}];\n"
    return w.fixed_register(name, "b64", f"{text}  cvta.to.global.u64 {name}, {name};")


def _load(w: Writer, i: int, statement: Statement) -> None:
    """A word or a chunk; what nobody writes while the kernel runs goes through the read-only path.

    Of a kernel that waits for the launches before it itself, that is what it reads early: the
    assembler moves loads of the read-only path across the wait, either way. So chunks that it loads
    before it waits go the other way, too. Words stay: several loads of one become one.
    """
    op, type_, _, position = statement
    space = "shared"
    if op not in SHARED:
        still = not w.ir.args[position].writable
        if "await_launches" in w.ir.ops and position not in w.ir.early:
            still = False
        if op == "load4" and i in w.ir.unawaited:
            still = False
        space = "global.nc" if still else "global"
    address = _address(w, statement)
    prefix, kind = TYPES[type_[:3]]
    if op[-1] == "4":
        lanes = w.chunks[i] = [w.new(prefix) for _ in range(4)]
        if op == "load4" and position in w.lines:
            space += f".L2::{w.lines[position]}B"
        w.emit(f"ld.{space}.v4.{kind} {braced(lanes)}, {address};")
    else:
        w.emit(f"ld.{space}.{kind} {w.result(i)}, {address};")


def _prefetch(w: Writer, i: int, statement: Statement) -> None:
    w.emit(f"prefetch.global.L2 {_address(w, statement)};")


def _extract(w: Writer, i: int, statement: Statement) -> None:
    w.values[i] = w.chunks[statement[2][0]][statement[3]]


def _store(w: Writer, i: int, statement: Statement) -> None:
    op, _, (_, *stored), _ = statement
    space = "shared" if op in SHARED else "global"
    address = _address(w, statement)
    words = [w.in_register(a) for a in stored]
    kind = w.kind(stored[0])
    if len(words) == 4:
        w.emit(f"st.{space}.v4.{kind} {address}, {braced(words)};")
    else:
        w.emit(f"st.{space}.{kind} {address}, {words[0]};")


def _atomic(w: Writer, i: int, statement: Statement) -> None:
    """One step on a word; the word before, where somebody wants it."""
    op, type_, (_, *operands), _ = statement
    kind, space = op.partition("_")[2], "shared" if op in SHARED else "global"
    address = _address(w, statement)
    values = ", ".join([w.in_register(a) for a in operands])
    what = f"{space}.{ATOMIC[kind].format(SIGNED[type_])}"
    if w.facts.last[i] < 0 and kind not in NO_RED:
        w.emit(f"red.{what} {address}, {values};")
    else:
        w.emit(f"atom.{what} {w.result(i)}, {address}, {values};")


RULES: dict[str, Rule] = {
    **dict.fromkeys(GLOBAL_ATOMICS | SHARED_ATOMICS, _atomic),
    **dict.fromkeys(("load", "load4", "sload", "sload4"), _load),
    **dict.fromkeys(("store", "store4", "sstore", "sstore4"), _store),
    "extract": _extract,
    "prefetch": _prefetch,
}
