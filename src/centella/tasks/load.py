"""From a model folder to its task object."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from contextvars import copy_context
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from centella.dtypes import DType, dtype_of, f32
from centella.errors import DTypeError, WeightsError
from centella.host.interrupts import uninterrupted
from centella.host.log import logger
from centella.host.workers import pool
from centella.ledger.counts import began, noted
from centella.runtime.device import Device
from centella.runtime.device import device as open_device
from centella.tasks.embed import Embedder, read_embedder
from centella.weights import Checkpoint, open_checkpoint
from centella.weights.folder import find_folder, read_config
from centella.weights.model_files import show

if TYPE_CHECKING:
    from centella.models.bert import BertModel
    from centella.models.config import ModelConfig


class Family(Struct, frozen=True):
    """An architecture and what it is used for; its module loads with the first model of it.

    Attributes:
        module: the name of its module; config, model: of the classes there.
        read_task: reads from a folder what the task has beside its model, for so many tokens;
            returns the function that takes the model.
    """

    module: str
    config: str
    model: str
    read_task: Callable[[Path, int], Callable[[BertModel], Embedder]]

    def classes(self) -> tuple[type[ModelConfig], Any]:
        """The class of its config, and that of its model."""
        module = importlib.import_module(self.module)
        return getattr(module, self.config), getattr(module, self.model)


# By the `model_type` of config.json.
FAMILIES = {"bert": Family("centella.models.bert", "BertConfig", "BertModel", read_embedder)}


def load(
    path: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto", *,
    warm: bool = False,
) -> Embedder:  # fmt: skip
    """The model of a folder, ready to use.

    Args:
        path: a folder with config.json, model.safetensors and tokenizer.json (without the last,
            the model takes ids, and `encode` of texts raises); or a repository of huggingface.co
            ("sentence-transformers/all-MiniLM-L6-v2"), which is downloaded once, unless the first
            part of its name is a folder here; or "minilm": the all-MiniLM-L6-v2 of an installed
            package.
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
    begin = began()
    folder = find_folder(path)
    values = read_config(folder)
    family = _family(folder, values)
    config_type, model_type = family.classes()
    config = config_type.from_dict(values, str(folder / "config.json"))
    opened = _opening(device)
    checkpoint = open_checkpoint(folder)
    config.check_sizes(checkpoint)
    task_of = family.read_task(folder, config.vocab_size)
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
    task = task_of(model)
    if warm:
        task.encode("warm")
    return task


def _family(folder: Path, values: dict[str, Any]) -> Family:
    """The row of a folder's `model_type`."""
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise WeightsError(
            f"{folder / 'config.json'}: model_type: expected {', '.join(FAMILIES)}, "
            f"got {show(name)}"
        )
    return FAMILIES[name]


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
            logger("load").warning(
                "load: dtype: the CPU computes in f32, and converts %s at each product: f32, or "
                "auto, is several times as fast, with twice the memory", kind.name,
            )  # fmt: skip
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
