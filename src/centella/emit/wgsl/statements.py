"""Statements of WGSL: memory, variables, control flow, and where the threads of a group meet."""

from __future__ import annotations

from centella.emit.wgsl.expressions import LANES
from centella.emit.wgsl.writer import Rule, Writer
from centella.lang.ir import GLOBAL_ATOMICS, SHARED, SHARED_ATOMICS, BufferArg, SharedArray
from centella.lang.structure import Statement

SUBGROUP_CALL = {
    "subgroup_add": "subgroupAdd", "subgroup_min": "subgroupMin", "subgroup_max": "subgroupMax",
}  # fmt: skip
ATOMIC_CALL = {
    "add": "atomicAdd", "min": "atomicMin", "max": "atomicMax", "and": "atomicAnd",
    "or": "atomicOr", "xor": "atomicXor", "exchange": "atomicExchange",
}  # fmt: skip

# -- memory ----------------------------------------------------------------------------------------


def _load(w: Writer, i: int, statement: Statement) -> None:
    target = _target(w, statement)
    w.let(i, f"atomicLoad(&{target})" if _array(w, statement).atomic else target)


def _store(w: Writer, i: int, statement: Statement) -> None:
    target = _target(w, statement)
    texts = [w.read(a) for a in statement[2][1:]]
    if _array(w, statement).atomic:
        w.line(f"atomicStore(&{target}, {texts[0]});")
    elif len(texts) == 1:
        w.line(f"{target} = {texts[0]};")
    else:
        w.line(f"{target} = vec4<{_array(w, statement).word}>({', '.join(texts)});")


def _atomic(w: Writer, i: int, statement: Statement) -> None:
    kind = statement[0].partition("_")[2]
    target = _target(w, statement)
    call = f"{ATOMIC_CALL[kind]}(&{target}, {w.read(statement[2][1])})"
    if w.uses[i]:
        w.let(i, call)
    else:
        w.line(f"{call};")


def _compare_exchange(w: Writer, i: int, statement: Statement) -> None:
    """WGSL's own may fail where the word is the expected one: it is tried until it has not."""
    expected, value = [w.temporary(a) for a in statement[2][1:]]
    index = w.temporary(statement[2][0])
    w.line(f"var v{i} = {expected};")
    w.line("loop {")
    target = f"{_name(statement)}[{index}]"
    w.line(f"  let x{i} = atomicCompareExchangeWeak(&{target}, {expected}, {value});")
    w.line(f"  v{i} = x{i}.old_value;")
    w.line(f"  if (x{i}.exchanged || v{i} != {expected}) {{ break; }}")
    w.line("}")
    w.text[i], w.depth[i] = f"v{i}", 0


def _array(w: Writer, statement: Statement) -> BufferArg | SharedArray:
    op, _, _, position = statement
    return w.ir.shared[position] if op in SHARED else w.ir.args[position]


def _target(w: Writer, statement: Statement) -> str:
    """The word or chunk of an access: a word is a lane where its array is accessed by chunks."""
    op, _, (index, *_), _ = statement
    name = _name(statement)
    if op[-1] == "4" or _array(w, statement).width == 1:
        return f"{name}[{w.read(index)}]"
    if w.ir.body[index][0] == "const":
        number = w.ir.body[index][3]
        return f"{name}[{number // 4}u].{LANES[number % 4]}"
    text = w.temporary(index)
    return f"{name}[{text} >> 2u][{text} & 3u]"


def _name(statement: Statement) -> str:
    return f"{'s' if statement[0] in SHARED else 'a'}{statement[3]}"


# -- variables and control flow --------------------------------------------------------------------


def _var(w: Writer, i: int, statement: Statement) -> None:
    w.line(f"var r{i}: {statement[1]} = {w.read(statement[2][0])};")


def _get(w: Writer, i: int, statement: Statement) -> None:
    """A variable's value, where it is used: what waits is written before the variable changes."""
    variable = statement[2][0]
    w.value(i, f"r{variable}", (), frozenset((variable,)))


def _assign(w: Writer, i: int, statement: Statement) -> None:
    variable, new = statement[2]
    value = w.read(new)
    w.settle(variable)
    w.line(f"r{variable} = {value};")


def _branch(w: Writer, i: int, statement: Statement) -> None:
    condition = w.read(statement[2][0])
    w.open(f"if ({condition}) {{")


def _otherwise(w: Writer, i: int, statement: Statement) -> None:
    w.close()
    w.open("} else {")


def _count(w: Writer, i: int, statement: Statement) -> None:
    """The start of a `for`: its bounds are read once."""
    _, type_, (first, *rest), _ = statement
    low = w.read(first)
    high, step = [w.temporary(a) for a in rest]
    if w.keep_loops and all(w.ir.body[a][0] == "const" for a in (first, rest[0])):
        high = f"min({high}, {type_}(wid.x) | {high})"  # is `high`, which no driver sees
    name = w.text[i] = f"v{i}"
    onward = f"{name} += {step}"
    leave = _leave(w, f"{name} >= {high}")
    header = f"for (var {name}: {type_} = {low}; {name} < {high}; {onward}) {{"
    if w.report_stops:
        header = f"for (var {name}: {type_} = {low}; ; {onward}) {{ {leave}"
    w.open(header, i, f"{onward}; {leave}", loop=True)


def _loop(w: Writer, i: int, statement: Statement) -> None:
    w.open("loop {", loop=True)


def _end(w: Writer, i: int, statement: Statement) -> None:
    block = w.close()
    w.line("}")
    if block.loop and w.report_stops:
        digest = f"0x{w.ir.digest[:8]}u"
        w.line(
            "if (ended[thread] == 0u) "
            f"{{ atomicAdd(&stopped[0], 1u); atomicStore(&stopped[1], {digest}); }}"
        )
        w.line("ended[thread] = 0u;")


def _break_if(w: Writer, i: int, statement: Statement) -> None:
    w.line(_leave(w, w.read(statement[2][0])))


def _leave(w: Writer, condition: str) -> str:
    """The end of a loop, noted where a driver may end it too.

    In memory: a driver's optimiser knows of no other end, and would take a variable as set.
    """
    noted = "ended[thread] = 1u; " if w.report_stops else ""
    return f"if ({condition}) {{ {noted}break; }}"


# -- groups ----------------------------------------------------------------------------------------


def _barrier(w: Writer, i: int, statement: Statement) -> None:
    w.line("workgroupBarrier();")
    if w.storage[i]:
        w.line("storageBarrier();")


def _workgroup_uniform(w: Writer, i: int, statement: Statement) -> None:
    """The first thread's value, through a variable of its own."""
    w.module.append(f"var<workgroup> shared_{i}: {statement[1]};")
    if w.storage[i]:
        w.line("storageBarrier();")
    w.line(f"if (thread == 0u) {{ shared_{i} = {w.read(statement[2][0])}; }}")
    w.let(i, f"workgroupUniformLoad(&shared_{i})")


def _subgroup(w: Writer, i: int, statement: Statement) -> None:
    w.let(i, f"{SUBGROUP_CALL[statement[0]]}({w.read(statement[2][0])})")


def _shuffle_xor(w: Writer, i: int, statement: Statement) -> None:
    w.let(i, f"subgroupShuffleXor({w.read(statement[2][0])}, {statement[3]}u)")


RULES: dict[str, Rule] = {
    **dict.fromkeys(("load", "load4", "sload", "sload4"), _load),
    **dict.fromkeys(("store", "store4", "sstore", "sstore4"), _store),
    **dict.fromkeys(GLOBAL_ATOMICS | SHARED_ATOMICS, _atomic),
    **dict.fromkeys(("atomic_compare_exchange", "satomic_compare_exchange"), _compare_exchange),
    "var": _var, "get": _get, "set": _assign, "if": _branch, "else": _otherwise, "for": _count,
    "loop": _loop, "end": _end, "break_if": _break_if, "barrier": _barrier,
    "workgroup_uniform": _workgroup_uniform, "shuffle_xor": _shuffle_xor,
    **dict.fromkeys(SUBGROUP_CALL, _subgroup),
}  # fmt: skip  # a table
