"""`centella kernels`: the library's kernels, and the source of one at a usual shape.

A sample records one public function on the simulator, which lays tensors out as a GPU does; the
recorded op is then lowered for the target that was asked for, as the planner does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from centella.cli.options import Json
from centella.cli.output import draw, out, out_json
from centella.cli.parts import Column, Table
from centella.dtypes import DType, bool_, dtype_of, f16, f32, i8, i32, u8
from centella.emit.ptx.tables import TARGETS, number_of
from centella.errors import CentellaError
from centella.op.op import get
from centella.ops.elementwise import TABLE, Expression
from centella.record.recording import Recording
from centella.runtime.device import device as open_device
from centella.specs import Caps
from centella.tensors import functional as f
from centella.tensors.creation import empty
from centella.tensors.state import State
from centella.tensors.tensor import Tensor, apply

Make = Callable[..., Any]


class Target(StrEnum):
    """What `centella kernels` prints."""

    wgsl = "wgsl"
    ptx = "ptx"
    ir = "ir"


Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="A kernel of the list; without NAME: print the list."),
]
What = Annotated[Target, typer.Option(help="What to print.")]
Arch = Annotated[
    str | None, typer.Option(metavar="A", help="Of --target ptx: sm_80 (the default), sm_90a, ...")
]


class Kind(StrEnum):
    """Of the floats of a sample."""

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"


Floats = Annotated[Kind, typer.Option("--dtype", help="Dtype of the floats in the source.")]
# KB of workgroup memory that a group may ask for (CUDA Programming Guide, compute capabilities).
SHARED = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
LEAST_SHARED = 48


# Kernels that no function is named after: what has them run, and what they are for.
VARIANTS = {
    "columns": ("matmul", "one row times a matrix, which is read once"),
    "gemv": ("linear", "one row or a few: each weight is read once"),
    "linear_blocks": ("linear", "weights of 8 or 4 bits in blocks, each with a factor"),
    "skinny": ("linear", "few rows by weights of 8 bits with a factor a row"),
    "assign": ("State.assign", "an array into a State's memory, in place"),
    "cache_step": ("KVCache.begin", "the positions of a cache's next step"),
    "cache_attend": ("KVCache.append_attend", "a token's key and value cached, and its attention"),
    "cache_write": ("KVCache.append", "rows of k and v into a cache"),
    "cache_write_i8": ("KVCache.append", "rows of k and v into a cache in i8, each with a scale"),
    "normed_linear": ("normed_linear", "act(rms_norm(x) Wg^T) (rms_norm(x) Wu^T)"),
    "linear_norm": ("linear", "many rows: a product and the norm of its result"),
    "expert_linear": ("Generator.generate", "the experts of each row: gates, or sums by share"),
    "sample": ("Generator.generate", "the next token of each sequence"),
    "beam_select": ("Generator.generate", "the candidates of a beam search that go on"),
    "beam_blocks": ("Generator.generate", "the blocks of keys and values of beams that go on"),
    "cache_copy": ("Generator.generate", "keys and values of blocks into others of a pool"),
    "cache_copy_i8": ("Generator.generate", "the same of a pool in i8, with scales"),
    "speech_beams": ("Transcriber.transcribe", "the best texts that beams may become"),
    "speech_move": ("Transcriber.transcribe", "beams that go on: what they see, and their notes"),
    "speech_scores": ("Transcriber.transcribe", "scores of the tokens that beams may take"),
    "speech_token": ("Transcriber.transcribe", "the next token of each window, by its rules"),
    "rope_cache_write": ("KVCache.append_qkv", "q, k and v of a step: rotated, k and v cached"),
    "rope_attend": ("KVCache.attend_qkv", "q, k and v of a step: rotated, cached, attended to"),
    "attend_linear": ("KVCache.attend_qkv", "the same with the product that reads what they get"),
    "rope_cache_write_i8": ("KVCache.append_qkv", "the same for a cache in i8"),
    "scatter_reduce": ("scatter", "values combined along an axis, after a sort of indices"),
    "fused": ("a chain of operations", "all in one launch; intermediates stay in registers"),
}


def samples() -> dict[str, tuple[str, Callable[[Make], Any]]]:
    """Each kernel by its name: what it computes, and a call of it.

    Public operations come first, then `VARIANTS`. The call gets `t(*shape, dtype=)`, which makes a
    tensor, of the sample's floats where it names no dtype.
    """
    rows = "softmax log_softmax l2_normalize sum mean max min argmax".split()
    calls: dict[str, Callable[[Make], Any]] = {
        **{n: partial(_case, n) for n in VARIANTS},
        **{n: partial(_of, getattr(f, n)) for n in rows},
        **{e.name: partial(_expression, e) for e in TABLE},
        "layer_norm": lambda t: f.layer_norm(t(64, 384), t(384), t(384)),
        "rms_norm": lambda t: f.rms_norm(t(64, 384), t(384)),
        "where": lambda t: f.where(t(64, 384, dtype=bool_), t(64, 384), 0.0),
        "cast": lambda t: f.cast(t(64, 384), f32 if t(1).dtype is f16 else f16),
        "full": lambda t: f.full((64, 384), 1.0, device=t(1).device),
        "concat": lambda t: f.concat([t(64, 384), t(64, 384)]),
        "dot": lambda t: f.dot(t(4096), t(4096)),
        "matmul": lambda t: f.matmul(t(2048, 512), t(512, 2048)),
        "linear": lambda t: f.linear(t(128, 384), t(1536, 384), t(1536), activation="gelu"),
        "gemv": lambda t: f.linear(t(1, 4096, dtype=f16), t(1024, 4096, dtype=f16)),
        "skinny": lambda t: f.linear(t(4, 4096), t(1024, 4096, dtype=i8), scale=t(1024)),
        "linear_blocks": lambda t: f.linear(
            t(1, 4096), t(1024, 2048, dtype=u8), scale=t(1024, 128, dtype=f16)
        ),
        "dequantize": lambda t: f.dequantize(t(1024, 4096, dtype=i8), t(1024, 128, dtype=f16)),
        "columns": lambda t: f.matmul(t(1, 4096), t(4096, 1024)),
        "attention": lambda t: (
            f.attention(*(t(1, 12, 128, 32) for _ in range(3))),
            f.attention(
                t(1, 32, 1, 128), *(t(1, 8, 4096, 128) for _ in range(2)), lengths=t(1, dtype=i32)
            ),
        ),
        "embedding": lambda t: f.embedding(t(128, dtype=i32), t(1000, 384)),
        "mean_pool": lambda t: f.mean_pool(t(8, 128, 384), t(8, dtype=i32)),
        "copy": lambda t: t(64, 384).T.copy(),
        "reshape": lambda t: t(64, 5).reshape(-1),
        "arange": lambda t: f.arange(4096, device=t(1).device),
        "gather": lambda t: f.gather(t(1000, 384), t(128, dtype=i32)),
        "scatter": lambda t: f.scatter(t(1000, 384), t(16, dtype=i32), t(16, 384)),
        "rope": lambda t: f.rope(
            t(1, 16, 128, 128), t(4096, 64, dtype=f32), t(4096, 64, dtype=f32), t(1, dtype=i32)
        ),
        "conv1d": lambda t: f.conv1d(t(1, 80, 3000), t(384, 80, 3), t(384), padding=1),
        "topk": lambda t: f.topk(t(64, 128), 8),
        "argsort": lambda t: f.argsort(t(64, 5000)),
        "cumsum": lambda t: f.cumsum(t(64, 384)),
        "take_along_axis": lambda t: f.take_along_axis(t(64, 384), t(64, 16, dtype=i32)),
    }  # fmt: skip
    public = [n for n in sorted(calls) if n not in VARIANTS]
    docs = {n: (getattr(f, n, None) or getattr(Tensor, n)).__doc__ or "" for n in public}
    lines = {n: docs[n].strip().splitlines()[0].removeprefix(f"{n}: ") for n in public}
    lines |= {n: what for n, (_, what) in VARIANTS.items()}
    return {name: (line, calls[name]) for name, line in lines.items()}


def _of(function: Callable[..., Any], t: Make) -> Any:
    return function(t(64, 384))


def _expression(expression: Expression, t: Make) -> Any:
    """Its usual call."""
    dtype = {"float": {}, "int": {"dtype": i32}, "bool": {"dtype": bool_}}[expression.kinds[0]]
    operands = [t(64, 384, **dtype) for _ in expression.operands]
    return apply(expression.name, *operands, **expression.example)


def _case(name: str, t: Make) -> Any:
    """Its largest case that the simulator takes; the device chooses the kernel."""
    from centella.check.cases.compare import record
    from centella.check.cases.table import TABLE as ROWS

    dtypes, floats = ROWS[name].dtypes, t(1).dtype.name
    dtype = next((d for d in (floats, "f32") if d in dtypes), dtypes[0])
    cases = [c for c in ROWS[name].cases if c.small and (not c.dtypes or dtype in c.dtypes)]
    case = max(cases, key=lambda case: sum(math.prod(i.shape) for i in case.inputs))
    device = t(1).device
    states = [State.empty(i.shape, dtype_of(i.dtype or dtype), device) for i in case.inputs]
    attrs = {n: v for n, v in case.attrs.items() if n != "variant"}
    return record(get(name), [state.value for state in states], attrs, device)


def recorded(call: Callable[[Make], Any], floats: DType = f32) -> list[Any]:
    """The nodes that a sample records.

    Args:
        floats: dtype of its tensors that have none of their own.
    """
    device = open_device("simulator")
    recording = Recording(device, explicit=True)

    def make(*shape: int, dtype: Any = floats) -> Any:
        return empty(shape, dtype, device)

    with recording:
        call(make)
    return recording.nodes


def programs(
    call: Callable[[Make], Any], target: str, arch: str = "sm_80", floats: DType = f32
) -> list[Any]:
    """The programs that a sample runs on a target, in order of launch.

    Args:
        floats: as of `recorded`.

    Raises:
        LimitError, TraceError: where a kernel cannot be emitted for the target.
    """
    caps = _caps(target, arch)
    programs: dict[str, Any] = {}
    for node in recorded(call, floats):
        for launch in node.form.lower(caps).calls:
            program = launch.kernel.program(
                caps,
                tuple(ref.spec.dtype for ref in launch.tensors),
                tuple(ref.spec.unit_rows for ref in launch.tensors),
                launch.constants,
                launch.workgroup,
                launch.signature,
            )
            programs[program.key] = program
    return list(programs.values())


def _caps(target: str, arch: str) -> Any:
    """What WebGPU guarantees, or what every CUDA device of today has."""
    if target != "ptx":
        return Caps(target)
    return Caps(
        target, max_storage_buffers=64, max_workgroup=1024,
        max_shared=SHARED.get(number_of(arch), LEAST_SHARED) << 10, arch=arch, native_exp2=True,
        family="nvidia",
    )  # fmt: skip


def run(
    name: Name = None, target: What = Target.wgsl, arch: Arch = None, dtype: Floats = Kind.f32,
    as_json: Json = False,
) -> None:  # fmt: skip
    """List the kernels, or print the source of one.

    Raises:
        CentellaError: for an unknown name or PTX target, or a PTX target of another one.
    """
    known = samples()
    if arch is not None and arch not in TARGETS:
        raise CentellaError(f"kernels: --arch: expected one of {', '.join(TARGETS)}, got {arch!r}")
    if arch is not None and target is not Target.ptx:
        raise CentellaError(f"kernels: --arch: expected --target ptx beside it, got {target}")
    if name is None:
        _list(known, as_json)
        return
    if name not in known:
        near = get_close_matches(name, known)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
        raise CentellaError(f"no kernel {name!r}; {hint}")
    what, call = known[name]
    printed = programs(call, target.value, arch or "sm_80", dtype_of(dtype.value))
    if as_json:
        out_json([_described(p) for p in printed])
        return
    mark = "#" if target == "ir" else "//"
    for program in printed:
        tensors = ", ".join(f"{a.name}: {a.dtype.name}" for a in program.ir.args)
        out(f"{mark} {name}: {what}")
        out(f"{mark} kernel {program.name}({tensors}), {target}, {program.ir.workgroup} threads")
        out(program.source.rstrip("\n"))


def _described(program: Any) -> dict[str, Any]:
    """A program as plain data."""
    return {
        "kernel": program.name,
        "target": program.target,
        "workgroup": program.ir.workgroup,
        "shared_bytes": program.ir.shared_bytes,
        "arguments": [
            {"name": a.name, "mode": a.mode, "dtype": a.dtype.name} for a in program.ir.args
        ],
        "source": program.source,
    }


def _list(known: dict[str, tuple[str, Any]], as_json: bool) -> None:
    """A row an operation, its variants indented below it; last what is no operation."""
    operations = {name: what for name, (what, _) in known.items() if name not in VARIANTS}
    if as_json:
        variants = {n: {"of": of, "computes": what} for n, (of, what) in VARIANTS.items()}
        out_json({"operations": operations, "variants": variants})
        return
    below: dict[str, list[str]] = {}
    for name, (of, _) in VARIANTS.items():
        below.setdefault(of, []).append(name)
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys([*operations, *below]):
        rows.append((name, operations.get(name, "")))
        rows += [(f"  {variant}", known[variant][0]) for variant in below.get(name, ())]
    draw(Table((Column("kernel", wraps=False), Column("computes")), rows))
    out("\nsource of one: centella kernels softmax --target wgsl (or ptx, ir)")
