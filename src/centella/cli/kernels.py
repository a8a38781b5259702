"""`centella kernels`: the library's kernels, and the source of one at a usual shape.

A sample records one public function on the simulator, which lays tensors out as a GPU does; the
recorded op is then lowered for the target that was asked for, as the planner does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Make = Callable[..., Any]


def samples() -> dict[str, tuple[str, Callable[[Make], Any]]]:
    """Each kernel by its public name: what it computes, and a call of it on f32 tensors.

    The call gets `t(*shape, dtype=f32)`, which makes a tensor.
    """
    from centella import functional as f
    from centella.dtypes import bool_, f16, i32
    from centella.tensor import Tensor

    unary = "abs elu exp gelu leaky_relu log neg relu sigmoid sqrt swish tanh".split()
    binary = "add sub mul div maximum minimum".split()
    rows = "softmax log_softmax l2_normalize sum mean max min argmax".split()
    calls: dict[str, Callable[[Make], Any]] = {
        **{n: _of(getattr(f, n), 1) for n in (*unary, *rows)},
        **{n: _of(getattr(f, n), 2) for n in binary},
        "layer_norm": lambda t: f.layer_norm(t(64, 384), t(384), t(384)),
        "rms_norm": lambda t: f.rms_norm(t(64, 384), t(384)),
        "scale": lambda t: f.scale(t(64, 384), 0.5),
        "clip": lambda t: f.clip(t(64, 384), 0.0, 1.0),
        "where": lambda t: f.where(t(64, 384, dtype=bool_), t(64, 384), 0.0),
        "cast": lambda t: f.cast(t(64, 384), f16),
        "full": lambda t: f.full((64, 384), 1.0, device=t(1).device),
        "concat": lambda t: f.concat([t(64, 384), t(64, 384)]),
        "dot": lambda t: f.dot(t(4096), t(4096)),
        "matmul": lambda t: f.matmul(t(128, 384), t(384, 384)),
        "linear": lambda t: f.linear(t(128, 384), t(1536, 384), t(1536), activation="gelu"),
        "attention": lambda t: f.attention(*(t(1, 12, 128, 32) for _ in range(3))),
        "embedding": lambda t: f.embedding(t(128, dtype=i32), t(1000, 384)),
        "mean_pool": lambda t: f.mean_pool(t(8, 128, 384), t(8, dtype=i32)),
        "copy": lambda t: t(64, 384).T.copy(),
        "reshape": lambda t: t(64, 6).reshape(-1),
    }
    docs = {n: (getattr(f, n, None) or getattr(Tensor, n)).__doc__ or "" for n in calls}
    return {name: (docs[name].strip().splitlines()[0], calls[name]) for name in sorted(calls)}


def _of(function: Callable[..., Any], operands: int) -> Callable[[Make], Any]:
    return lambda t: function(*(t(64, 384) for _ in range(operands)))


def recorded(call: Callable[[Make], Any]) -> list[Any]:
    """The nodes that a sample records."""
    from centella.device import device as open_device
    from centella.dtypes import f32
    from centella.recording import Recording
    from centella.tensor import empty

    device = open_device("simulator")
    recording = Recording(device, explicit=True)

    def make(*shape: int, dtype: Any = f32) -> Any:
        return empty(shape, dtype, device)

    device.batches().append(recording)
    try:
        call(make)
    finally:
        device.batches().remove(recording)
    return recording.nodes


def programs(call: Callable[[Make], Any], target: str, arch: str = "sm_80") -> list[Any]:
    """The programs that a sample runs on a target, in order of launch.

    Raises:
        LimitError, TraceError: where a kernel cannot be emitted for the target.
    """
    caps = _caps(target, arch)
    found: dict[str, Any] = {}
    for node in recorded(call):
        specs = tuple(operand.spec for operand in node.inputs)
        for launch in node.op.lower(specs, node.outputs, dict(node.attrs), caps).calls:
            program = launch.kernel.program(
                caps,
                tuple(ref.spec.dtype for ref in launch.tensors),
                tuple(ref.spec.unit_rows for ref in launch.tensors),
                launch.constants,
                launch.workgroup,
                launch.face,
            )
            found[program.key] = program
    return list(found.values())


def _caps(target: str, arch: str) -> Any:
    """What WebGPU guarantees, or what every CUDA device of today has."""
    from centella.specs import Caps

    if target != "ptx":
        return Caps(target)
    return Caps(
        target, max_storage_buffers=64, max_workgroup=1024, max_shared=48 << 10, arch=arch,
        family="nvidia",
    )  # fmt: skip


def run(name: str | None, target: str, arch: str) -> None:
    """List the kernels, or print the source of one.

    Raises:
        CentellaError: for an unknown name.
    """
    from centella.errors import CentellaError

    known = samples()
    if name is None:
        _list(known)
        return
    if name not in known:
        raise CentellaError(f"no kernel {name!r}; there are {', '.join(known)}")
    what, call = known[name]
    mark = "#" if target == "ir" else "//"
    for program in programs(call, target, arch):
        tensors = ", ".join(f"{a.name}: {a.dtype.name}" for a in program.ir.args)
        print(f"{mark} {name}: {what}")
        print(f"{mark} kernel {program.name}({tensors}), {target}, {program.ir.workgroup} threads")
        print(program.source.rstrip("\n"))


def _list(known: dict[str, tuple[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("kernel", no_wrap=True)
    table.add_column("computes", overflow="fold")
    for name, (what, _) in known.items():
        table.add_row(name, what)
    console.print(table, markup=False)
    console.print("\nsource of one: centella kernels softmax --target wgsl (or ptx, ir)")
