"""From a model folder or file to its task object."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, TypedDict, Unpack, overload

from centella.backends.opening import import_driver
from centella.dtypes import DType, bf16, dtype_of, f32
from centella.errors import DeviceError, DTypeError, WeightsError
from centella.host.interrupts import uninterrupted
from centella.host.log import logger
from centella.host.memory import available
from centella.host.workers import pool
from centella.ledger.counts import began, noted
from centella.runtime.device import Device, every_device
from centella.runtime.device import device as open_device
from centella.tasks.families import (
    EMBEDDING_DECODER,
    HEADS,
    RANKING_DECODER,
    TASKS,
    ModelFiles,
    family_of,
    way_to,
)
from centella.tensors.arguments import check_progress, flag, one_of, refuse_names
from centella.tensors.quantizers import QUANTIZERS
from centella.weights import open_checkpoint
from centella.weights.folder import find_model, is_gguf, read_config
from centella.weights.model_files import is_file, read_json, show

if TYPE_CHECKING:
    from centella.tasks.classify.classifier import Classifier, TokenClassifier
    from centella.tasks.classify.label_runner import LabelRunner
    from centella.tasks.embed.embedder import Embedder
    from centella.tasks.generate.generator import Generator
    from centella.tasks.transcribe.transcriber import Transcriber

Devices = Literal["all"] | Sequence[str | Device]
# What ends the names of matrices that GGUF files have in f32 whatever the others are in; no vector
# is asked either.
WIDE = (".mlp.gate.weight", ".position_embeddings.weight", ".token_type_embeddings.weight")
ROOM = 0.9  # of the CPU's free memory, or of its limit: more of it is not filled with f32


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of `load`, as it documents them."""

    warm: bool
    quantize: str | None
    progress: Callable[[int, int], None] | None


class EmbedderOptions(LoadOptions, total=False):
    """Those of a model that embeds."""

    devices: Devices | None


@overload
def load(  # noqa: D418
    path: Literal["minilm"], device: str | Device | None = None, dtype: Any = "auto", *,
    task: None = None, **options: Unpack[EmbedderOptions],
) -> Embedder:  # fmt: skip
    """The `Embedder` of MiniLM."""


@overload
def load(  # noqa: D418
    path: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto", *,
    task: Literal["embed"], **options: Unpack[EmbedderOptions],
) -> Embedder:  # fmt: skip
    """A model that embeds."""


@overload
def load(  # noqa: D418
    path: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto", *,
    task: Literal["generate"], **options: Unpack[LoadOptions],
) -> Generator:  # fmt: skip
    """A model that generates."""


@overload
def load(  # noqa: D418
    path: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto", *,
    task: Literal["classify"], **options: Unpack[LoadOptions],
) -> Classifier:  # fmt: skip
    """A model that gives texts labels, or ranks them."""


@overload
def load(  # noqa: D418
    path: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto", *,
    task: Literal["tag"], **options: Unpack[LoadOptions],
) -> TokenClassifier:  # fmt: skip
    """A model that gives tokens labels."""


@overload
def load(  # noqa: D418
    path: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto", *,
    task: Literal["transcribe"], **options: Unpack[LoadOptions],
) -> Transcriber:  # fmt: skip
    """A model that transcribes."""


@overload
def load(  # noqa: D418
    path: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto", *,
    task: str | None = None, **options: Unpack[EmbedderOptions],
) -> Any:  # fmt: skip
    """A model of any task."""


def load(
    path: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto", *,
    warm: bool = False, task: str | None = None, quantize: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    devices: Devices | None = None, **other: Never,
) -> Any:  # fmt: skip
    """Load a model from a folder, a repository of huggingface.co or a GGUF file.

    Args:
        path: one of: a folder with config.json, model.safetensors (or pytorch_model.bin, whose code
            is not run) and tokenizer.json, in older folders vocab.txt, or vocab.json and merges.txt
            (without them the model takes ids only, and `encode` of texts raises); a repository of
            huggingface.co ("sentence-transformers/all-MiniLM-L6-v2"), which is downloaded once,
            unless the first part of its name is a local folder; "minilm", the all-MiniLM-L6-v2 of
            an installed package; a .gguf file of a decoder or a BERT. A decoder is loaded as an
            `Embedder` if its GGUF file states a pooling.
        device: where to; default: the default device.
        dtype: of weights and arithmetic. "auto" keeps the checkpoint's dtype for weights; CUDA
            computes in it (in bf16 for quantised files), other devices compute in f32, and the CPU
            also stores f32 weights, if its memory has room. "f32", "f16" or "bf16" sets both.
            Quantised weights keep their format with every dtype. On the CPU "f16" and "bf16" take
            longer and log a warning.
        warm: run the model on a text of one word before returning, so that programs are compiled
            and memory is allocated before the first request.
        task: "embed", "generate", "classify", "tag" or "transcribe": the expected task, which also
            tells type checkers the type of the result; None: the folder decides.
        quantize: "q8_0" or "q4_0": quantise the weights of products, the embedding and the head of
            a decoder on the device while they are loaded, in blocks of 32 along their rows. Norms,
            biases and tensors that are quantised in the file stay as they are.
        progress: `progress(done, total)` is called with numbers of bytes while weights are sent to
            the device.
        devices: instead of `device`, several devices for a model that embeds or classifies: "all"
            (every device of the default device's kind), or a list. Each device has a copy of the
            weights and a thread that takes the next batch when the device has room. Results are in
            the order of the texts. If a device fails, the log names it and the others run its
            texts.

    Returns:
        By the `model_type` of config.json: an `Embedder` for "bert", a `Generator` for the
        decoders ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "smollm3", "granite",
        "olmo2", "gemma2", "gemma3_text"), a `Transcriber` for "whisper". A decoder is an `Embedder`
        if its folder has a modules.json, or with task="embed"; without a modules.json its vectors
        are the last token's state. With task="classify" a decoder ranks, as Qwen3-Reranker does, by
        the probability that it answers "yes".

    Raises:
        WeightsError: a file or tensor is missing, malformed or left over; the architecture is not
            supported; rows to quantise are not a multiple of 32. The error names file, tensor,
            expected, got.
        MissingExtraError: a package that reading the folder needs is not installed.
        DTypeError: an unknown dtype; `devices`, `warm` or `progress` of another type.
        ShapeError: another `quantize`.
        OutOfMemoryError, LimitError: the weights do not fit on the device. Raised before any weight
            is sent; states the bytes needed and free, and which `quantize` would fit.
    """
    refuse_names("load", other)
    flag("load", "warm", warm)
    check_progress("load", progress)
    if devices is not None:
        return _on_several(devices, device, progress, path=path, dtype=dtype, warm=warm, task=task,
                           quantize=quantize)  # fmt: skip
    begin = began()
    if quantize is not None:
        one_of("load", "quantize", quantize, tuple(QUANTIZERS))
    root = find_model(path)
    files = (_open_gguf if is_gguf(root) else _open_folder)(root, task)
    family = files.family
    if task is not None and one_of("load", "task", task, TASKS) != family.task:
        raise WeightsError(
            f"{files.config_file}: model_type: expected one to {task} with, got "
            f"{show(files.values['model_type'])}, which is to {family.task} with: "
            f"{way_to(family.task)}"
        )
    if quantize is not None and not family.quantizes:
        raise WeightsError(
            f"{files.config_file}: quantize: expected a decoder or a model to transcribe with, got "
            f"{show(files.values['model_type'])}"
        )
    config_type, model_type = family.classes()
    config = config_type.from_dict(files.values, files.config_file)
    opened = _opening(device)
    tensors = files.tensors(config)
    config.check_sizes(tensors, files.config_file)
    task_of = files.read_task(config.vocab_size)
    noted("open model", begin)
    begin = began()
    where = opened()
    noted("open device", begin)
    weights, activations = _dtypes(dtype, tensors, where)
    begin = began()
    model = model_type(config, activations)
    model.load_parameters(
        tensors, device=where, dtype=weights,
        vector_dtype=f32 if family.wide_vectors else activations, quantize=quantize,
        origin=files.origin, progress=progress,
    )  # fmt: skip
    noted("load weights", begin)
    loaded = task_of(model)
    if warm:
        loaded.warm()
    return loaded


def _on_several(
    devices: Devices, device: str | Device | None, progress: Callable[[int, int], None] | None,
    **options: Any,
) -> Embedder | LabelRunner:  # fmt: skip
    """The model on the first device, with replicas on the others."""
    if device is not None:
        raise DeviceError("load: expected device or devices, got both")
    if isinstance(devices, str):
        one_of("load", "devices", devices, ("all",))
    elif not isinstance(devices, Sequence):
        raise DTypeError(
            f'load: devices: expected "all" or a list of devices, got {type(devices).__name__}'
        )
    opened = every_device() if isinstance(devices, str) else [open_device(d) for d in devices]
    if not opened or len({id(d) for d in opened}) < len(opened):
        raise DeviceError(f"load: devices: expected one or more, each once, got {devices!r}")
    loaded: list[Any] = []
    for number, where in enumerate(opened):

        def told(done: int, total: int, number: int = number) -> None:
            if progress is not None:
                progress(number * total + done, len(opened) * total)

        model = load(device=where, progress=told, **options)
        if not hasattr(model, "replicas"):
            raise WeightsError(
                f"{options['path']}: devices: expected a model that embeds or classifies, got a "
                f"{type(model).__name__}, which one device runs"
            )
        loaded.append(model)
    first: Embedder | LabelRunner = loaded[0]
    first.replicas = tuple(loaded[1:])
    return first


def _open_folder(folder: Path, task: str | None) -> ModelFiles:
    values, file = read_config(folder), str(folder / "config.json")
    family = family_of(file, values)
    listed = values.get("architectures")
    name = str(listed[0]) if isinstance(listed, list) and listed else ""
    saved = read_json(folder / "config_sentence_transformers.json")
    pooled = is_file(folder / "modules.json") and saved.get("model_type") != "CrossEncoder"
    if family.task == "generate" and (task == "embed" or (task is None and pooled)):
        family = EMBEDDING_DECODER
    elif family.task == "generate" and task == "classify":
        family = RANKING_DECODER
    elif family.task == "embed" and not pooled and task != "embed":
        family = next((row for end, row in HEADS.items() if name.endswith(end)), family)
    return ModelFiles(
        str(folder), file, values, family, lambda config: open_checkpoint(folder),
        lambda vocab_size: family.read_task(folder, vocab_size),
    )  # fmt: skip


def _open_gguf(path: Path, task: str | None) -> ModelFiles:
    from centella.tasks.gguf_files import open_files

    return open_files(path, task)


@uninterrupted
def _opening(device: str | Device | None) -> Callable[[], Device]:
    """Gives the device once it is open: its driver takes its time while the folder is read."""
    if isinstance(device, Device):
        return lambda: device
    import_driver(device)
    try:
        thread = pool(1, "centella-open")
        opened = thread.submit(copy_context().run, open_device, device)
    except RuntimeError:  # the process ends, or may start no thread
        return lambda: open_device(device)
    thread.shutdown(wait=False)
    return opened.result


def _dtypes(dtype: Any, tensors: Mapping[str, Any], device: Device) -> tuple[DType, DType]:
    """Of weights and of activations."""
    if dtype != "auto":
        kind = dtype_of(dtype)
        if not kind.is_float:
            raise DTypeError(f"load: dtype: expected auto, f32, f16 or bf16, got {kind.name}")
        if device.caps.on_host and kind is not f32:
            logger("load").warning(
                "load: dtype: the CPU computes in f32, and rounds each result to %s: f32, or auto, "
                "is faster and more exact", kind.name,
            )  # fmt: skip
        return kind, kind
    quantised = any(getattr(tensor, "format", "") for tensor in tensors.values())
    of_matrices = {
        tensor.dtype
        for name, tensor in tensors.items()
        if tensor.dtype is not None and tensor.dtype.is_float
        and len(tensor.shape) > 1 and not name.endswith(WIDE)
    }  # fmt: skip
    stored = of_matrices.pop() if len(of_matrices) == 1 else f32  # of a mix, which holds all
    if device.caps.narrow_activations:
        return stored, bf16 if quantised else stored
    return (_of_host(stored, tensors, device) if device.caps.on_host else stored), f32


def _of_host(stored: DType, tensors: Mapping[str, Any], device: Device) -> DType:
    """What the CPU keeps weights in: f32, which need not be widened, where there is room for it."""
    if stored is f32:
        return f32
    nbytes = 0
    for tensor in tensors.values():
        floats = tensor.dtype is not None and tensor.dtype.is_float
        nbytes += f32.itemsize * math.prod(tensor.shape) if floats else tensor.nbytes
    known = [int(ROOM * n) for n in (available(), device.memory.budget) if n is not None]
    if not known or nbytes <= min(known):
        return f32
    logger("load").info(
        "load: the weights stay %s: with f32 they need %s bytes, and %s may be taken",
        stored.name, f"{nbytes:,}", f"{min(known):,}",
    )  # fmt: skip
    return stored
