"""What tests of the kernel language share: tensors of words, and launches in simulator and WebGPU.

A test lays tensors out itself (offsets, pitches, poison in every pad), records a kernel, runs the
one IR in the simulator, with every check, and as WGSL on an adapter (in CI: lavapipe), and compares
the words. Tint, the WGSL compiler of browsers, parses every module too where it is installed:
`npm install webgpu`, and the folder that holds its `node_modules` in CENTELLA_TINT.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import math
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wgpu
from numpy.typing import NDArray

import centella as ct
from centella import lang
from centella.backends.webgpu import arithmetic
from centella.dtypes import DType, f32, i32, narrow, u32, widen
from centella.emit.wgsl import emit_wgsl
from centella.emit.wgsl.expressions import REWRITTEN
from centella.errors import CentellaError, TraceError
from centella.lang import KernelIR, signature_of
from centella.lang.kernel_params import Signature, TensorParam
from centella.simulator.run import Report, simulate, unwritten

Array = NDArray[Any]
Words = NDArray[np.uint32]
POISON = 0x7FC0BAD0
ORDERS = ("forward", "reverse", "shuffled")
MOST_GROUPS = 65_535  # along one side of a grid, on every adapter

# -- tensors ---------------------------------------------------------------------------------------


@dataclass
class Tensor:
    """Words on a device, and where the elements lie in them."""

    words: Words
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def elements(self) -> NDArray[np.int64]:
        """The position of each element, counted from the start of the words."""
        grid = np.meshgrid(*[np.arange(n) for n in self.shape], indexing="ij")
        at = sum(g * s for g, s in zip(grid, self.strides, strict=True))
        return np.asarray(at + self.offset, dtype=np.int64)

    def numpy(self) -> Array:
        """The elements as values."""
        return widen(self.words.view(self.dtype.numpy)[self.elements()], self.dtype)

    def bits(self) -> Words:
        """The elements of a 4-byte dtype, bit for bit."""
        return self.words[self.elements()]

    def logical(self) -> NDArray[np.bool_]:
        """The words that hold an element."""
        mask = np.zeros(self.words.size, np.bool_)
        mask[self.elements() // self.dtype.per_word] = True
        return mask


def empty(shape: tuple[int, ...], dtype: DType, offset: int = 0) -> Tensor:
    """A dense vector, or a matrix whose rows start on a 16-byte boundary; full of poison."""
    pitch = -(-shape[-1] // dtype.per_chunk) * dtype.per_chunk
    strides = (1,) if len(shape) == 1 else (pitch, 1)
    size = offset + math.prod(shape[:-1]) * pitch
    words = np.full(-(-size // dtype.per_word), POISON, np.uint32)
    return Tensor(words, dtype, shape, strides, offset)


def tensor(values: Any, dtype: DType = f32, offset: int = 0) -> Tensor:
    """Values on a device; pads hold poison."""
    values = np.asarray(values)
    result = empty(values.shape, dtype, offset)
    result.words.view(dtype.numpy)[result.elements()] = narrow(values, dtype)
    return result


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with words of their own."""
    return {name: replace(t, words=t.words.copy()) for name, t in tensors.items()}


# -- recording and launching -----------------------------------------------------------------------


def record(
    fn: Callable[..., Any], tensors: dict[str, Tensor], workgroup: int = 32, **constants: Any
) -> KernelIR:
    """Trace a kernel for tensors."""
    return lang.trace(
        fn,
        signature_of(fn),
        workgroup=workgroup,
        dtypes={name: t.dtype for name, t in tensors.items()},
        unit={name: t.strides[-1] == 1 for name, t in tensors.items()},
        constants=constants,
    )


def assert_refused(wrong: Callable[[], Any], text: str, threads: int) -> None:
    """Fail unless a kernel that does this is refused while it is traced."""

    def kernel(y: lang.Out[f32]) -> None:
        wrong()
        y[lang.local_id()] = 0.0

    with pytest.raises(TraceError, match=text):
        record(kernel, {"y": empty((threads,), f32)}, threads)


def parameters(
    ir: KernelIR, tensors: dict[str, Tensor], scalars: dict[str, Any] | None = None
) -> Words:
    """The bits of each launch parameter."""
    bits = np.zeros(len(ir.params), np.uint32)
    for i, param in enumerate(ir.params):
        name, what, *axis = (*param.source, "")
        if not what:
            kind = {"f32": "f4", "i32": "i4", "u32": "u4"}[param.type]
            bits[i] = np.array([(scalars or {})[str(name)]], kind).view(np.uint32)[0]
        elif what == "offset":
            bits[i] = tensors[str(name)].offset
        else:
            t = tensors[str(name)]
            bits[i] = (t.strides if what == "stride" else t.shape)[int(axis[0])]
    return bits


def on_simulator(
    ir: KernelIR, tensors: dict[str, Tensor], groups: int, scalars: dict[str, Any] | None = None,
    **options: Any,
) -> Report:  # fmt: skip
    """Run a kernel in the simulator; the tensors change in place."""
    words = [tensors[a.name].words for a in ir.args]
    report = simulate(ir, words, parameters(ir, tensors, scalars), groups, **options)
    if options.get("check", True):
        logical = [tensors[a.name].logical() if a.mode == "out" else None for a in ir.args]
        unwritten(ir, report.written, logical)
    return report


@cache
def _adapter() -> tuple[Any, str]:
    try:
        return ct.device("webgpu").backend.native, ""
    except (CentellaError, ImportError, OSError) as error:
        return None, str(error)


def webgpu() -> Any:
    """The wgpu device; the test is skipped where there is none and none is required."""
    device, why = _adapter()
    if device is None:
        assert "webgpu" not in os.environ.get("CENTELLA_REQUIRE", ""), why
        pytest.skip(f"no WebGPU adapter: {why}")
    return device


@cache
def source_of(ir: KernelIR) -> str:
    """The WGSL of a kernel as the device runs it."""
    return emit_wgsl(ir, settled=REWRITTEN if _rewrites() else frozenset())


@cache
def _rewrites() -> bool:
    return arithmetic.rewrites(webgpu())


@cache
def _pipeline(source: str) -> Any:
    device = webgpu()
    module = device.create_shader_module(code=source)
    compute = {"module": module, "entry_point": "main"}
    return device.create_compute_pipeline(layout="auto", compute=compute)


def on_webgpu(
    ir: KernelIR,
    tensors: dict[str, Tensor],
    groups: int,
    scalars: dict[str, Any] | None = None,
) -> None:
    """Run a kernel as WGSL; the tensors change in place."""
    device = webgpu()
    pipeline = _pipeline(source_of(ir))
    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
    buffers = []
    for arg in ir.args:
        words = tensors[arg.name].words
        padded = np.full(max(4, -(-words.size // 4) * 4), POISON, np.uint32)
        padded[: words.size] = words
        buffers.append(device.create_buffer_with_data(data=padded, usage=usage))
    launch = np.zeros(-(-(1 + len(ir.params)) // 4) * 4, np.uint32)
    launch[0] = groups
    launch[1 : 1 + len(ir.params)] = parameters(ir, tensors, scalars)
    bound = [*buffers, device.create_buffer_with_data(data=launch, usage=wgpu.BufferUsage.UNIFORM)]
    used = source_of(ir)
    entries = [
        {"binding": i, "resource": {"buffer": b, "offset": 0, "size": b.size}}
        for i, b in enumerate(bound)
        if i == len(buffers) or f"a{i}[" in used
    ]
    group = device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
    encoder = device.create_command_encoder()
    run = encoder.begin_compute_pass()
    run.set_pipeline(pipeline)
    run.set_bind_group(0, group)
    run.dispatch_workgroups(min(groups, MOST_GROUPS), -(-groups // MOST_GROUPS), 1)
    run.end()
    device.queue.submit([encoder.finish()])
    for arg, buffer in zip(ir.args, buffers, strict=True):
        if arg.writable:
            words = tensors[arg.name].words
            words[:] = np.frombuffer(device.queue.read_buffer(buffer), np.uint32)[: words.size]


KINDS = {"f": f32, "i": i32, "u": u32}


def element_kernel(
    fn: Callable[..., Any], *operands: Any, out: DType = f32, workgroup: int = 32
) -> tuple[KernelIR, dict[str, Tensor], int]:
    """A kernel that applies `fn` to one element of each operand; its tensors and groups."""
    arrays = [np.asarray(x) for x in operands]
    tensors = {f"x{i}": tensor(a, KINDS[a.dtype.kind]) for i, a in enumerate(arrays)}
    tensors["y"] = empty(arrays[0].shape, out)

    def kernel(y: Any, **inputs: Any) -> None:
        per = out.per_word
        first = lang.global_id() * per
        last = y.shape(0) - 1
        with lang.if_(first <= last):
            positions = [lang.minimum(first + k, last) for k in range(per)]
            values = [fn(*[x[at] for x in inputs.values()]) for at in positions]
            y.store(first, values)

    signatures = [
        (n, TensorParam("out" if n == "y" else "in", t.dtype, 1)) for n, t in tensors.items()
    ]
    name = getattr(fn, "__name__", "element")
    signature = Signature(tuple(signatures), (), ())
    ir = lang.trace(kernel, signature, workgroup=workgroup, dtypes={}, name=name)
    return ir, tensors, -(-arrays[0].size // (workgroup * out.per_word))


def compute(fn: Callable[..., Any], *operands: Any, out: DType = f32, **options: Any) -> Array:
    """`fn` of all elements, as the simulator has it."""
    ir, tensors, groups = element_kernel(fn, *operands, out=out)
    on_simulator(ir, tensors, groups, **options)
    return tensors["y"].numpy()


def compute_twice(fn: Callable[..., Any], *operands: Any, out: DType = f32) -> tuple[Array, Array]:
    """`fn` of all elements: the simulator's result and WebGPU's. Tint accepts the module."""
    ir, tensors, groups = element_kernel(fn, *operands, out=out)
    second = copies(tensors)
    on_simulator(ir, tensors, groups)
    on_webgpu(ir, second, groups)
    return tensors["y"].numpy(), second["y"].numpy()


def collatz(n: Any) -> Any:
    """Steps until n is 1: a loop that threads leave one by one, with branches in branches."""
    x, steps = lang.var(n), lang.var(0)
    with lang.loop():
        lang.break_if(x == 1)
        with lang.if_((x & 1) == 0):
            x.set(x // 2)
        with lang.else_():
            with lang.if_(x < 100):
                x.set(x * 3 + 1)
            with lang.else_():
                x.set(x * 3 + 1)
        steps += 1
    return steps


# -- compilers ------------------------------------------------------------------------------------


@functools.cache
def cuda_tool(name: str) -> str | None:
    """A tool of NVIDIA's wheels: `ptxas` is in `nvidia-cuda-nvcc`.

    One on the PATH is of any version: what CUDA 13.0 has refuses other texts than today's.
    """
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob(f"*/bin/{name}")):
            return str(path)
    return None


@functools.cache
def ptxas(*options: str) -> str:
    """What NVIDIA's ptxas says by itself; the test is skipped where there is none."""
    path = cuda_tool("ptxas")
    if path is None:
        pytest.skip("no ptxas here (pip install nvidia-cuda-nvcc)")
    return subprocess.run([path, *options], capture_output=True, text=True, check=True).stdout


def assembled(text: str, options: Sequence[str], source: Path, output: Path | None = None) -> str:
    """What ptxas reports of a text, which is written to `source`.

    Without an `output`, what it reported of the same text before is kept in the folder
    $CENTELLA_PTXAS_CACHE, if there is one: it depends on nothing but its version, options and text.

    Raises:
        AssertionError: it refuses the text.
    """
    known = "\0".join((ptxas("--version"), *options, text))
    folder = os.environ.get("CENTELLA_PTXAS_CACHE") if output is None else None
    kept = Path(folder, hashlib.sha256(known.encode()).hexdigest()) if folder else None
    if kept is not None and kept.exists():
        return kept.read_text()
    source.write_text(text)
    command = [str(cuda_tool("ptxas")), *options, str(source), "-o", str(output or os.devnull)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    report = done.stderr + done.stdout
    assert done.returncode == 0, f"{report}\n{text}"
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        half = kept.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        half.write_text(report)
        half.replace(kept)
    return report


# -- Tint ------------------------------------------------------------------------------------------

_TINT = """
import fs from 'node:fs';
import { pathToFileURL } from 'node:url';
const [, folder, answer] = process.argv;
const { create, globals } = await import(pathToFileURL(`${folder}/node_modules/webgpu/index.js`));
Object.assign(globalThis, globals);
const gpu = create(['backend=null']);  // a name of its own: it must outlive the device
const adapter = await gpu.requestAdapter();
const device = await adapter.requestDevice();
device.pushErrorScope('validation');
const faults = [];
for (const code of JSON.parse(fs.readFileSync(0, 'utf8'))) {
  const info = await device.createShaderModule({ code }).getCompilationInfo();
  const errors = info.messages.filter((m) => m.type === 'error');
  faults.push(errors.map((m) => `${m.lineNum}: ${m.message}`).join('; '));
}
fs.writeFileSync(answer, JSON.stringify(faults));
process.exit(gpu && 0);
"""


def tint(sources: Sequence[str]) -> list[str]:
    """What Tint has against each module: nothing, or its errors with their lines."""
    folder, node = os.environ.get("CENTELLA_TINT"), shutil.which("node")
    if not folder or node is None:
        pytest.skip("no Tint here: npm install webgpu, and its folder in CENTELLA_TINT")
    with tempfile.TemporaryDirectory() as temporary:
        answer = Path(temporary) / "faults.json"
        done = subprocess.run(
            [node, "--input-type=module", "-e", _TINT, str(Path(folder).resolve()), str(answer)],
            input=json.dumps(list(sources)),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert answer.exists(), done.stderr[-2000:]
        faults: list[str] = json.loads(answer.read_text())
    return faults
