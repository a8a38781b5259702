"""From a model folder to its task object."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, overload

from msgspec import Struct

from centella.dtypes import DType, bf16, dtype_of, f32
from centella.errors import DeviceError, DTypeError, WeightsError
from centella.host.interrupts import uninterrupted
from centella.host.log import logger
from centella.host.workers import pool
from centella.ledger.counts import began, noted
from centella.runtime.device import Device, every_device
from centella.runtime.device import device as open_device
from centella.tasks.classify import Classifier, TokenClassifier, read_classifier, read_ranker
from centella.tasks.embed import Embedder
from centella.tasks.embed_folder import read_decoder_embedder, read_embedder
from centella.tasks.generate import Generator
from centella.tasks.generator_files import read_generator, read_gguf
from centella.tensors.arguments import flag, one_of, refuse_names
from centella.tensors.quantizers import QUANTIZERS
from centella.weights import open_checkpoint
from centella.weights.folder import find_folder, read_config
from centella.weights.gguf import GGUF, open_gguf
from centella.weights.model_files import is_file, read_json, show

if TYPE_CHECKING:
    from centella.models.config import ModelConfig
    from centella.tasks.transcribe import Transcriber

    Task = Embedder | Generator | Classifier | TokenClassifier | Transcriber


class Family(Struct, frozen=True):
    """An architecture and what it is used for; its module loads with the first model of it.

    Attributes:
        module: the name of its module; config, model: of the classes there.
        read_task: reads from a folder what the task has beside its model, for so many tokens;
            returns the function that takes the model.
        task: what it is for, one of `TASKS`.
        wide_vectors: whether norms and biases are f32, whatever the dtype of the activations.
        quantizes: whether weights may be quantised as they are loaded.
    """

    module: str
    config: str
    model: str
    read_task: Callable[[Path, int], Callable[[Any], Task]]
    wide_vectors: bool = False
    task: str = "embed"
    quantizes: bool = False

    def classes(self) -> tuple[type[ModelConfig], Any]:
        """The class of its config, and that of its model."""
        module = importlib.import_module(self.module)
        return getattr(module, self.config), getattr(module, self.model)


def read_transcriber(folder: Path, vocab_size: int) -> Callable[[Any], Transcriber]:
    """Read what a Transcriber has beside its model; its modules load with the first one."""
    from centella.tasks import transcribe

    return transcribe.read_transcriber(folder, vocab_size)


Devices = Literal["all"] | Sequence[str | Device]
TASKS = ("embed", "generate", "classify", "tag", "transcribe")
COMMANDS = {"embed": "embed", "generate": "generate", "classify": "rank",
            "transcribe": "transcribe"}  # fmt: skip
# What ends the names of matrices that GGUF files have in f32 whatever the others are in; no vector
# is asked either.
WIDE = (".mlp.gate.weight", ".position_embeddings.weight", ".token_type_embeddings.weight")
# By the `model_type` of config.json.
FAMILIES = {
    **dict.fromkeys(
        "albert bert camembert distilbert electra gte modernbert mpnet new nomic_bert roberta "
        "xlm-roberta".split(),
        Family("centella.models.bert", "BertConfig", "BertModel", read_embedder),
    ),
    **dict.fromkeys(
        "gemma2 gemma3_text granite llama mistral olmo2 phi3 qwen2 qwen3 qwen3_moe smollm3".split(),
        Family(
            "centella.models.llama", "LlamaConfig", "LlamaModel", read_generator, True, "generate",
            True,
        ),
    ),
    "whisper": Family(
        "centella.models.whisper", "WhisperConfig", "WhisperModel", read_transcriber, True,
        "transcribe", True,
    ),
}  # fmt: skip
# Of a decoder in a folder of sentence-transformers, or one that is asked for to embed.
EMBEDDING_DECODER = Family(
    "centella.models.llama_encoder", "LlamaEncoderConfig", "LlamaEncoder", read_decoder_embedder,
    True, quantizes=True,
)  # fmt: skip
# Of a decoder that is asked for to classify.
RANKING_DECODER = Family(
    "centella.models.llama_ranker", "LlamaRankerConfig", "LlamaRanker", read_ranker, True,
    "classify", True,
)  # fmt: skip
# Of an encoder with a head, by the end of its `architectures`.
HEADS = {
    f"For{kind}Classification": Family(
        "centella.models.bert_head", "LabelConfig", "LabelModel", read_classifier, task=task
    )
    for kind, task in (("Sequence", "classify"), ("Token", "tag"))
}


@overload
def load(  # noqa: D418
    path: Literal["minilm"], device: str | Device | None = None, dtype: Any = "auto", *,
    warm: bool = False, task: None = None, quantize: None = None,
    progress: Callable[[int, int], None] | None = None,
    devices: Devices | None = None,
) -> Embedder:  # fmt: skip
    """The `Embedder` of MiniLM."""


@overload
def load(  # noqa: D418
    path: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto", *,
    warm: bool = False, task: Literal["embed"], quantize: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    devices: Devices | None = None,
) -> Embedder:  # fmt: skip
    """A model that embeds."""


@overload
def load(  # noqa: D418
    path: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto", *,
    warm: bool = False, task: Literal["generate"], quantize: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Generator:  # fmt: skip
    """A model that generates."""


@overload
def load(  # noqa: D418
    path: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto", *,
    warm: bool = False, task: Literal["classify"], quantize: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Classifier:  # fmt: skip
    """A model that gives texts labels, or ranks them."""


@overload
def load(  # noqa: D418
    path: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto", *,
    warm: bool = False, task: Literal["tag"], quantize: None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TokenClassifier:  # fmt: skip
    """A model that gives tokens labels."""


@overload
def load(  # noqa: D418
    path: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto", *,
    warm: bool = False, task: Literal["transcribe"], quantize: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Transcriber:  # fmt: skip
    """A model that transcribes."""


@overload
def load(  # noqa: D418
    path: str | PathLike[str], device: str | Device | None = None, dtype: Any = "auto", *,
    warm: bool = False, task: str | None = None, quantize: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    devices: Devices | None = None,
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
            is not run) and tokenizer.json (without it the model takes ids only, and `encode` of
            texts raises); a repository of huggingface.co
            ("sentence-transformers/all-MiniLM-L6-v2"), which is downloaded once, unless the first
            part of its name is a local folder; "minilm", the all-MiniLM-L6-v2 of an installed
            package; a .gguf file of a decoder or a BERT. A decoder is loaded as an `Embedder` if
            its GGUF file states a pooling.
        device: where to; default: the default device.
        dtype: of weights and arithmetic. "auto" keeps the checkpoint's dtype for weights; CUDA
            computes in it (in bf16 for quantised files), other devices compute in f32, and the CPU
            also stores f32 weights. "f32", "f16" or "bf16" sets both. Quantised weights keep their
            format with every dtype. On the CPU "f16" and "bf16" take several times as long and log
            a warning.
        warm: run the model on a text of one word before returning, so that programs are compiled
            and memory is allocated before the first request.
        task: "embed", "generate", "classify", "tag" or "transcribe": the expected task, which also
            tells type checkers the type of the result; None: the folder decides.
        quantize: "q8_0" or "q4_0": quantise the weights of products, the embedding and the head of
            a decoder on the device while they are loaded, in blocks of 32 along their rows. Norms,
            biases and tensors that are quantised in the file stay as they are.
        progress: `progress(done, total)` is called with numbers of bytes while weights are sent to
            the device.
        devices: instead of `device`, several devices for a model that embeds: "all" (every device
            of the default device's kind), or a list. Each device has a copy of the weights and a
            thread that embeds the next batch when the device has room. Results are in the order of
            the texts. If a device fails, the log names it and the others embed its texts.

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
    if progress is not None and not callable(progress):
        raise DTypeError(
            f"load: expected None or a function of two numbers for progress, got {progress!r:.80}"
        )
    if devices is not None:
        return _on_several(devices, device, progress, path=path, dtype=dtype, warm=warm, task=task,
                           quantize=quantize)  # fmt: skip
    begin = began()
    if quantize is not None:
        one_of("load", "quantize", quantize, tuple(QUANTIZERS))
    files = (
        _open_gguf(Path(path), task) if _is_gguf(path) else _open_folder(find_folder(path), task)
    )
    family = files.family
    if task is not None and one_of("load", "task", task, TASKS) != family.task:
        raise WeightsError(
            f"{files.config_file}: model_type: expected one to {task} with, got "
            f"{show(files.values['model_type'])}, which is to {family.task} with: "
            f"{_way(family.task)}"
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
    made = task_of(model)
    if warm:
        made.warm()
    return made


def _on_several(
    devices: Devices, device: str | Device | None, progress: Callable[[int, int], None] | None,
    **options: Any,
) -> Embedder:  # fmt: skip
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
    loaded: list[Embedder] = []
    for number, where in enumerate(opened):

        def told(done: int, total: int, number: int = number) -> None:
            if progress is not None:
                progress(number * total + done, len(opened) * total)

        model = load(device=where, progress=told, **options)
        if not isinstance(model, Embedder):
            raise WeightsError(
                f"{options['path']}: devices: expected a model that embeds, got a "
                f"{type(model).__name__}, which one device runs"
            )
        loaded.append(model)
    loaded[0].replicas = tuple(loaded[1:])
    return loaded[0]


def _way(task: str) -> str:
    """How to use a model of another task."""
    command = COMMANDS.get(task)
    return f'ct.load(.., task="{task}")' + (f", or centella {command}" if command else "")


class _Files(Struct, frozen=True):
    """A model on disk, its config read and its family known.

    Attributes:
        origin: the folder or file; config_file: where its config is, for errors.
        values: of its config.
        tensors: opens the weights, by the names of a safetensors folder.
        read_task: reads what its task has beside the model.
    """

    origin: str
    config_file: str
    values: dict[str, Any]
    family: Family
    tensors: Callable[[Any], Mapping[str, Any]]
    read_task: Callable[[int], Callable[[Any], Task]]


def _open_folder(folder: Path, task: str | None) -> _Files:
    values, file = read_config(folder), str(folder / "config.json")
    family = _family(file, values)
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
    return _Files(
        str(folder), file, values, family, lambda config: open_checkpoint(folder),
        lambda vocab_size: family.read_task(folder, vocab_size),
    )  # fmt: skip


def _is_gguf(path: Any) -> bool:
    return isinstance(path, (str, PathLike)) and Path(path).suffix.lower() == ".gguf"


def _open_gguf(path: Path, task: str | None) -> _Files:
    from centella.models import bert_gguf, llama_gguf

    file, origin = open_gguf(path), str(path)
    if file.values.get("general.architecture") == bert_gguf.ARCHITECTURE:
        return _Files(
            origin, origin, bert_gguf.config_values(file), FAMILIES["bert"],
            lambda config: bert_gguf.tensors_of(file), lambda _: _embedder_of(file, "mean"),
        )  # fmt: skip
    values = llama_gguf.config_values(file)
    family, read = _gguf_decoder(file, _family(origin, values), task)
    return _Files(
        origin, origin, values, family,
        lambda config: llama_gguf.tensors_of(file, config.head_dim), lambda _: read(),
    )  # fmt: skip


def _gguf_decoder(
    file: GGUF, family: Family, task: str | None
) -> tuple[Family, Callable[[], Callable[[Any], Task]]]:
    """What a decoder is used for, and what reads that task: as asked, else as its pooling says."""
    from centella.tasks.embed_gguf import pooling_of, read_gguf_ranker

    if task == "classify":
        return RANKING_DECODER, lambda: read_gguf_ranker(file)
    if task == "embed" or (task is None and pooling_of(file)):
        return EMBEDDING_DECODER, lambda: _embedder_of(file, "lasttoken")
    return family, lambda: read_gguf(file)


def _embedder_of(file: GGUF, usual: str) -> Callable[[Any], Embedder]:
    from centella.tasks.embed_gguf import read_gguf_embedder

    return read_gguf_embedder(file, usual)


def _family(file: str, values: dict[str, Any]) -> Family:
    """The row of a config's `model_type`."""
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise WeightsError(f"{file}: model_type: expected {', '.join(FAMILIES)}, got {show(name)}")
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


def _dtypes(dtype: Any, tensors: Mapping[str, Any], device: Device) -> tuple[DType, DType]:
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
    # NumPy would widen 16-bit weights anew for each product.
    return (f32 if device.caps.target == "numpy" else stored), f32
