"""What callers give to the public functions, checked before it is used: typed errors for the rest.

Each takes the function's name and the argument's, which begin the error's text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np

from centella.dtypes import Array
from centella.errors import ContractError, DTypeError, ShapeError
from centella.op.op import get
from centella.tensors.tensor import Tensor, not_a_tensor

BEYOND = 2.0**128 - 2.0**103  # what rounds to no f32


def check_tensors(op: str, *operands: Any) -> None:
    """Refuse what is no tensor.

    Raises:
        DTypeError: for anything else, with the way to make one.
    """
    for one in operands:
        if not isinstance(one, Tensor):
            raise not_a_tensor(op, one)


def check_called(model: str, operands: Sequence[Any], write: str) -> None:
    """Refuse a call of a model with texts or audio in place of tensors.

    Raises:
        DTypeError: with what to write.
    """
    if operands and not isinstance(operands[0], Tensor):
        raise DTypeError(f"{model}: expected a Tensor, got {type(operands[0]).__name__}; {write}")


def number(op: str, name: str, value: Any) -> int | float:
    """A number of Python or NumPy, as Python's.

    Raises:
        DTypeError: for anything else; a tensor is not read back for it.
    """
    plain = value.item() if isinstance(value, np.generic) else value
    if not isinstance(plain, (int, float)):
        raise DTypeError(f"{op}: expected a number for {name}, got {type(value).__name__}")
    return plain


def real(op: str, name: str, value: Any) -> float:
    """A number as a float; one beyond the range of f32 is infinite.

    Raises:
        DTypeError: for anything else, and for an integer that no float holds.
    """
    plain = number(op, name, value)
    try:
        as_float = float(plain)
    except OverflowError as error:
        raise DTypeError(f"{op}: expected {name} within the range of floats") from error
    return math.copysign(math.inf, as_float) if abs(as_float) >= BEYOND else as_float


def epsilon(op: str, value: Any) -> float:
    """The eps of a norm: a finite number of 0 or more.

    Raises:
        DTypeError: for what is no number; ShapeError: for another number, which gives NaN.
    """
    if type(value) is float and 0.0 <= value < BEYOND:
        return value
    eps = real(op, "eps", value)
    if not 0.0 <= eps < math.inf:
        raise ShapeError(f"{op}: expected a finite eps of 0 or more, got {value!r}")
    return eps


def expect_finite(op: str, what: str, rows: Array, first: int = 0) -> None:
    """Refuse results [n, ...] that are not finite.

    Args:
        what: a row is, for errors; first: the number of the first.

    Raises:
        ContractError: names the first row that is not finite.
    """
    finite = np.isfinite(rows)
    if not finite.all():
        row = int(np.argmin(finite.reshape(len(rows), -1).all(1)))
        number = rows[row][~finite[row]].flat[0]
        raise ContractError(
            f"{op}: expected finite numbers, got {number} in {what} {first + row:,}; the weights "
            f"are broken, or the dtype is too narrow: f32 and bf16 hold more than f16"
        )


def flag(op: str, name: str, value: Any) -> bool:
    """True or False, of Python or NumPy.

    Raises:
        DTypeError: for anything else: a text or a tensor would always be true.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise DTypeError(f"{op}: expected True or False for {name}, got {type(value).__name__}")
    return bool(value)


def whole(op: str, name: str, value: Any, least: int = 0) -> int:
    """A whole number, `least` or more.

    Raises:
        ShapeError: for a lower one; DTypeError: for what is none.
    """
    try:
        n = index(value)
    except TypeError as error:
        raise DTypeError(f"{op}: expected a whole number for {name}, got {value!r:.80}") from error
    if isinstance(value, bool):
        raise DTypeError(f"{op}: expected a whole number for {name}, got {value}")
    if n < least:
        raise ShapeError(f"{op}: expected {name} of {least} or more, got {value!r}")
    return n


# What other libraries call an argument that has another name here.
_RENAMED = {
    "dim": "axis", "dims": "axis", "axes": "axis", "keepdim": "keepdims",
    "normalize_embeddings": "normalize", "show_progress_bar": "progress", "truncate_dim": "dim",
    "precision": "dtype", "activation_fn": "activation", "activation_fct": "activation",
}  # fmt: skip
# What to do instead of giving an argument.
_INSTEAD = {
    "convert_to_tensor": "the vectors are NumPy's; torch.from_numpy(vectors) shares their memory",
    "convert_to_numpy": "the vectors are NumPy's",
    "output_value": "model(ids, lengths) gives the states of tokens",
    "prompts": "prompt_name= names a prompt of the folder, prompt= is one",
    "task": "prompt_name= names a prompt of the folder, prompt= is one",
    **dict.fromkeys(
        ("max_length", "max_seq_length"),
        "model.config.max_length; chunk= embeds longer texts in pieces",
    ),
    "apply_softmax": 'activation="softmax" gives shares of a whole',
    "return_documents": "each result has its text",
    **dict.fromkeys(
        ("return_dense", "return_sparse", "return_colbert_vecs"),
        'embed(texts, ("dense", "sparse", "multi")) gives several outputs',
    ),
    **dict.fromkeys(
        ("num_workers", "multi_process_chunk_size", "target_devices"),
        'no process is started; ct.load(..., devices="all") has the model on every device',
    ),
    "outputs": "embed(texts, outputs) gives more than vectors",
    "device": "ct.load(..., device=...) says where a model is",
    "pool": 'ct.load(..., devices="all") has the model on every device',
    "chunk_size": "batch_size= says how many texts are on the device at once",
}  # fmt: skip

# Of `load`: those of sentence-transformers' and transformers' classes.
_OF_LOAD = {
    "truncate_dim": "encode(..., dim=256)",
    "trust_remote_code": "no code of a folder is run: the families are those of docs/encoders.md",
    "torch_dtype": "write dtype=", "model_name_or_path": "write path=",
    "load_in_8bit": 'write quantize="q8_0"', "load_in_4bit": 'write quantize="q4_0"',
    "device_map": 'devices="all" has the model on every device',
    "token": "HF_TOKEN is the token of huggingface.co",
    "local_files_only": "HF_HUB_OFFLINE=1 downloads nothing",
    "cache_folder": "HF_HOME is the folder of downloads",
    "model_kwargs": "write dtype=, quantize=",
    **dict.fromkeys(("backend", "providers"), 'write device="cuda", "webgpu" or "cpu"'),
    "device_index": 'write device="cuda:1"',
    **dict.fromkeys(("compute_type", "quantization"), "write dtype=, quantize="),
    **dict.fromkeys(("n_gpu_layers", "tensor_parallel_size"), "a whole model is on one device="),
    **dict.fromkeys(("n_ctx", "max_model_len"), "memory grows with a text, to the model's context"),
    **dict.fromkeys(("cpu_threads", "n_threads"), "OPENBLAS_NUM_THREADS sets them on the CPU"),
    "revision": "huggingface_hub.snapshot_download(name, revision=...) gives the folder of one",
    **dict.fromkeys(("download_root", "cache_dir"), "HF_HOME is the folder of downloads"),
    **dict.fromkeys(("model_path", "model_size_or_path", "model"), "write path="),
    **dict.fromkeys(("embedding", "embeddings"), 'write task="embed"'),
    **dict.fromkeys(("activation_fn", "activation_fct"), "rank and predict take activation="),
    **dict.fromkeys(
        ("max_seq_length", "max_length", "prompts", "default_prompt_name", "similarity_fn_name"),
        "model.config has it; msgspec.structs.replace changes it",
    ),
}  # fmt: skip
# Of `Index` and its `search`: those of FAISS, sentence-transformers, LanceDB and Chroma.
_K = ("top_k", "topk", "top", "n", "n_results", "limit", "num_results", "n_neighbors")
_DOT = "scores are dot products: of vectors of length 1 the cosine"
_OF_SEARCH = {
    **dict.fromkeys(_K, "write k="),
    **dict.fromkeys(("threshold", "score_threshold", "radius"), "choose by matches.scores"),
    **dict.fromkeys(
        ("filter", "where", "ids"), "every row is compared; a database filters: docs/search.md"
    ),
    **dict.fromkeys(("metric", "score_function", "distance_type"), _DOT),
    "batch_size": "all queries of a call are given at once",
    "normalize": "encode(..., normalize=True) gives vectors of length 1",
}
_OF_INDEX = {
    **dict.fromkeys(("metric", "metric_type", "space", "distance"), _DOT),
    **dict.fromkeys(("dim", "d", "ndim", "dimension"), "the vectors say it"),
    **dict.fromkeys(("documents", "names", "labels", "metadatas"), "write texts="),
    "ids": "search gives rows, which are the ids; texts= takes any list",
    "normalize": _OF_SEARCH["normalize"],
    **dict.fromkeys(
        ("nlist", "nprobe", "M", "ef_construction", "index_type", "connectivity"),
        "every vector is compared: there is nothing to tune",
    ),
}
_OF_ALL = {**{name: f"write {ours}=" for name, ours in _RENAMED.items()}, **_INSTEAD}
_OF_RANK = {**_OF_ALL, **dict.fromkeys(("k", "top_n", "limit"), "write top_k=")}
_OF_ONE = {"load": _OF_LOAD, "search": _OF_SEARCH, "Index": _OF_INDEX, "rank": _OF_RANK}


def refuse_names(op: str, other: Mapping[str, object]) -> None:
    """Refuse arguments that a function does not have.

    Raises:
        DTypeError: if there is one; with the name that it has here, where that is known.
    """
    hints = _OF_ONE.get(op, _OF_ALL)
    for name in other:
        raise unknown_argument(op, name, hints.get(name, ""))


def unknown_argument(op: str, name: str, hint: str) -> DTypeError:
    """The error for an argument that a function does not have; `hint`: what to write, or ""."""
    return DTypeError(f"{op}: unknown argument {name}={f'; {hint}' if hint else ''}")


def one_of(op: str, name: str, value: Any, known: Iterable[str]) -> str:
    """One of the names that an argument may have.

    Raises:
        ShapeError: for another, with those that there are.
    """
    names = tuple(known)
    if not isinstance(value, str) or value not in names:
        raise ShapeError(f"{op}: expected {name} of {', '.join(names)}, got {value!r}")
    return value


def variant_attrs(op: str, variant: str | None, **attrs: Any) -> dict[str, Any]:
    """Attributes of an op, with the variant where one is forced."""
    if variant is not None:
        attrs["variant"] = one_of(op, "variant", variant, get(op).variants)
    return attrs


def check_progress(op: str, progress: object) -> None:
    """Refuse a `progress` that cannot be called.

    Raises:
        DTypeError: it is neither None nor a function.
    """
    if progress is not None and not callable(progress):
        raise DTypeError(
            f"{op}: expected None or a function of two numbers for progress, got {progress!r:.80}"
        )
