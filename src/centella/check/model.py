"""`check_model`: a checkpoint on a device, module by module, beside another implementation."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from centella.backends.base import Array
from centella.check.cases.compare import difference
from centella.check.decoder import (
    Decoded,
    model_of,
    prompt_of,
    quantized_of,
    run_decoder,
    run_reference,
    tokens_of,
)
from centella.check.report import Layer, ModelReport, device_fields
from centella.check.speech import MEL, run_speech, run_speech_reference, sound_of
from centella.dtypes import DType, dtype_of
from centella.errors import MissingExtraError, WeightsError
from centella.models.llama_encoder import LlamaEncoder
from centella.nn import Module
from centella.runtime.device import Device
from centella.runtime.device import device as open_device
from centella.tasks.embed.embedder import Embedder
from centella.tasks.generate.generator import Generator
from centella.tasks.load import load
from centella.tasks.transcribe.transcriber import Transcriber
from centella.tensors.creation import asarray
from centella.tensors.tensor import Tensor, fetch
from centella.weights.folder import find_model, is_gguf

T = TypeVar("T")
Outputs = dict[str, Array]  # by path, in the order in which the modules were done

REFERENCE = ("torch", "transformers")
COMPILER = "triton"  # which CUDA builds of torch bring
# As the attention and the network of decoders: before what the module of that path adds here.
PARTS = ("DistilBertSelfAttention", "AlbertEmbeddings", "ElectraEmbeddings")
TEXT = "The keeper of the lighthouse counted 42 ships before the storm came up from the south."
# sum((got - expected)^2) / sum(expected^2) of a module's output at most: roundings add up over the
# layers of a model, an error in one of them is far larger.
LIMITS: dict[str, float] = {"f32": 1e-8, "f16": 1e-3, "bf16": 1e-2}


def check_model(
    folder: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto",
    quantize: str | None = None, audio: str | PathLike[str] | None = None,
) -> ModelReport:  # fmt: skip
    """Compare what each module of a checkpoint gives with `transformers`, or with the CPU.

    One text without padding runs through the model. Where `transformers` and torch are installed,
    outputs are compared with those of its modules of the same path, computed in float32; where
    they are not, and for GGUF files, with those of our CPU in f32. Of a decoder these are the
    states after each layer, the logits, and the tokens of a greedy continuation. A speech model is
    given a window of sound: its spectrogram, the states of encoder and decoder after each layer,
    the logits of all tokens at once and of one step after the other, and the tokens are compared.

    Args:
        folder: as `ct.load` takes it.
        device: default: the default device.
        dtype: as `ct.load` takes it.
        quantize: of a decoder or a speech model: compare it also with itself with weights in this
            format. What that changes is reported, and decides nothing.
        audio: of a speech model: a file whose first window is heard; None: a sound of numbers.

    Returns:
        A report: `ok`, `first` (the first layer that differs), `layers`, `tokens`, `quantized`,
        `card()`, `as_dict()`.

    Raises:
        WeightsError: the folder holds no model that this library knows, or one that has no use
            for quantize or audio; a GGUF file on the CPU.
        AudioError: what is no audio; names the file.
        MissingExtraError: the device is the CPU, and there is nothing to compare it with.
    """
    begin = time.perf_counter()
    root = find_model(folder)
    _import_reference(root)
    where = open_device(device)
    task = load(root, where, dtype)
    if audio is not None and not isinstance(task, Transcriber):
        raise WeightsError(f"{root}: audio: expected a speech model, got {type(task).__name__}")
    if isinstance(task, Generator | Transcriber):
        report = _check_text(task, root, where, dtype, quantize, audio)
    elif quantize is not None:
        raise WeightsError(f"{root}: quantize: expected a model to generate with, got one to embed")
    else:
        report = _check_modules(task, root, where)
    return ModelReport(
        **device_fields(where, time.perf_counter() - begin), folder=str(root), **report
    )


def _import_reference(root: Path) -> bool:
    """Import what a checkpoint is compared with; whether it is installed, and reads the checkpoint.

    It comes before a device is opened: Mesa's software Vulkan driver brings its LLVM into the
    process, and an LLVM that triton loads after it crashes.
    """
    if is_gguf(root) or not all(map(importlib.util.find_spec, REFERENCE)):
        return False
    compiler = [COMPILER] if importlib.util.find_spec(COMPILER) else []
    for name in (*REFERENCE, *compiler):
        importlib.import_module(name)
    return True


def _beside(
    root: Path, where: Device, theirs: Callable[[Path], T], ours: Callable[[Any], T]
) -> tuple[str, T]:
    """What a checkpoint is compared with, and what that gives.

    Args:
        theirs: of the folder, by transformers; ours: of the model on the CPU.
    """
    if _import_reference(root):
        version = importlib.import_module("transformers").__version__
        return f"transformers {version}, float32", theirs(root)
    if not where.caps.on_host:
        return "the CPU, f32", ours(load(root, "cpu", "f32"))
    if is_gguf(root):
        raise WeightsError(
            f"{root}: expected another device than the CPU, with which a GGUF file is compared"
        )
    raise MissingExtraError("transformers", "reference")


def _check_modules(task: Embedder, root: Path, where: Device) -> dict[str, Any]:
    """What `ModelReport` says of a model that embeds."""
    ids = np.array([task.tokenizer.encode([TEXT], task.config.max_length)[0]], np.int32)
    got, joined = run_model(task, ids)
    whole = _forward(task, ids).numpy()  # as it runs: joined, nothing kept in between

    def theirs(root: Path) -> Outputs:
        outputs = _transformers(task.model, root, ids)
        return {p: x for p, x in outputs.items() if p not in joined}

    def ours(task: Embedder) -> Outputs:
        return {p: x for p, (x, _) in run_model(task, ids)[0].items()}

    against, expected = _beside(root, where, theirs, ours)
    got[""] = whole, got[""][1]
    if isinstance(task.model, LlamaEncoder):  # inside a layer its modules give what others do not
        expected = {p: x for p, x in expected.items() if p.count(".") <= p.startswith("layers.")}
    layers = [_compared(p, *got[p], expected[p]) for p in got if p in expected]
    return {"against": against, "layers": tuple(layers)}


def _check_text(
    task: Generator | Transcriber, root: Path, where: Device, dtype: Any, quantize: str | None,
    audio: str | PathLike[str] | None,
) -> dict[str, Any]:  # fmt: skip
    """What `ModelReport` says of a model that writes text."""
    run, theirs = _of_sound(task, audio) if isinstance(task, Transcriber) else _of_text(task)
    against, expected = _beside(root, where, theirs, lambda task: run(task, None))
    got, kind = run(task, expected.ids), task.model.dtype
    layers = [
        _compared(p, x, dtype_of("f32") if p == MEL else kind, expected.states[p])
        for p, x in got.states.items()
    ]
    layers.append(_compared("", got.logits, kind, expected.logits))
    report: dict[str, Any] = {
        "against": against, "layers": tuple(layers),
        "tokens": tokens_of(got, expected, LIMITS[kind.name]),
    }  # fmt: skip
    if quantize is not None:
        name = "transcribe" if isinstance(task, Transcriber) else "generate"
        smaller = run(load(root, where, dtype, task=name, quantize=quantize), expected.ids)
        report["quantized"] = quantized_of(quantize, smaller, got)
    return report


# What ours gives, given the tokens of the other; and what that of transformers gives.
Runs = tuple[Callable[[Any, list[int] | None], Decoded], Callable[[Path], Decoded]]


def _of_text(task: Generator) -> Runs:
    ids = prompt_of(task, TEXT)
    return (
        lambda task, _: run_decoder(task, ids),
        lambda folder: run_reference(folder, ids, task.context),
    )


def _of_sound(task: Transcriber, audio: str | PathLike[str] | None) -> Runs:
    sound = sound_of(task, audio)
    return (
        lambda task, forced: run_speech(task, sound, forced),
        lambda folder: run_speech_reference(folder, sound),
    )


def run_model(task: Embedder, ids: Array) -> tuple[dict[str, tuple[Array, DType]], set[str]]:
    """What the modules that were called give.

    Returns:
        Output and dtype by path; the paths of layers that were given what follows them elsewhere
        (an activation, a residual), so that their output means more.
    """
    seen: dict[str, Tensor] = {}
    joined: set[str] = set()

    def tell(path: str, module: Module, output: object, arguments: Mapping[str, object]) -> None:
        if isinstance(output, Tensor):
            seen[path] = output
        more = bool(arguments.get("activation")) or arguments.get("residual") is not None
        if more and len(list(module.named_modules())) == 1:
            joined.add(path)

    with watched(task.model, tell):
        _forward(task, ids)
    values = fetch(*seen.values()).result()
    return {p: (x, t.dtype) for (p, t), x in zip(seen.items(), values, strict=True)}, joined


@contextmanager
def watched(
    model: Module, tell: Callable[[str, Module, object, Mapping[str, object]], None]
) -> Iterator[None]:
    """Inside, `tell(path, module, output, keywords)` is called after each module's `forward`.

    The model must be nobody else's meanwhile.
    """
    modules = list(model.named_modules())

    def telling(path: str, module: Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            tell(path, module, output, kwargs)
            return output

        return told

    for path, module in modules:
        vars(module)["forward"] = telling(path, module, module.forward)
    try:
        yield
    finally:
        for _, module in modules:
            del vars(module)["forward"]


def _forward(task: Embedder, ids: Array) -> Tensor:
    where = task.model.device
    lengths = np.array([ids.shape[1]], np.int32)
    return task(asarray(ids, device=where), asarray(lengths, device=where))


def _transformers(model: Module, folder: Path, ids: Array) -> Outputs:
    """What its modules give, by our paths."""
    theirs, torch = model_of("AutoModel", folder)
    expected: Outputs = {}

    def keep(path: str) -> Callable[[object, object, Any], None]:
        def hook(_: object, __: object, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) else output
            first = first[0] if isinstance(first, Mapping) else first
            if isinstance(first, torch.Tensor):
                expected[path] = first.detach().numpy()

        return hook

    for path, module in theirs.named_modules():
        # Of MPNet's bias theirs is looked up for each pair of positions, ours for each distance.
        apart = path.endswith((".self_attn", ".mlp", ".relative_attention_bias"))
        if apart or type(module).__name__ in PARTS:
            continue
        module.register_forward_hook(keep(model.rename(path)))
    with torch.inference_mode():
        theirs(input_ids=torch.from_numpy(ids.astype(np.int64)))
    return expected


def _compared(path: str, got: Array, dtype: DType, expected: Array) -> Layer:
    limit = LIMITS[dtype.name]
    if got.shape != expected.shape:
        why = f"expected shape {list(expected.shape)}"
        return Layer(path, got.shape, dtype.name, None, limit, why)
    wide, wanted = got.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        squares = max(float(np.square(wanted).sum()), 1e-300)
        error = float(np.square(wide - wanted).sum() / squares)
        worst = float(np.abs(wide - wanted).max(initial=0) / math.sqrt(squares / max(wide.size, 1)))
    off = difference(wide, wanted, dtype_of("f32"), limit)
    return Layer(
        path, got.shape, dtype.name, error if math.isfinite(error) else None, limit,
        "" if off is None else str(off), worst if math.isfinite(worst) else None,
    )  # fmt: skip
