"""What to write instead of a name that other array libraries have and this one spells otherwise.

Each thing has one name here, so a missing one is answered with it: `ct.tensor` by `ct.asarray`,
`x.sum()` by `ct.sum(x)`, `np.tanh(x)` by `ct.tanh(x)`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from centella.errors import DTypeError
from centella.lang.ufuncs import REFLECTED, reflected
from centella.ops.elementwise import EXPRESSIONS

# Functions of a tensor that other libraries also have as methods; those of NumPy under its names.
FUNCTIONS: frozenset[str] = frozenset(
    "argmax argsort broadcast_to cast chunk cumsum dot gather log_softmax matmul max mean min "
    "repeat scatter softmax sort split sum tril var".split()
) | (EXPRESSIONS.keys() - {"copy", "silu_gate"})
_DATA = "ct.asarray makes a tensor"
_GRAPH = "centella is for inference: there are no gradients"
_WHOLE = "the GPU has no 64-bit types here: f32, i32"
_LIKE = "ct.zeros(x.shape, x.dtype, x.device), and so on"
_NEW_AXIS = "x[None] for axis 0, x[:, None] for axis 1, x[..., None] for axis -1"
_DRAWN = "draw with NumPy: ct.asarray(rng.standard_normal(shape, np.float32))"
_INDEX = "ct.Index(vectors), which compares a query with every vector"
_SEARCH = "ct.Index(vectors).search(queries, k=10)"
_READ_ONLY = "model folders are read here, and never written"

# By name: what stands for it.
OF_MODULE: dict[str, str] = {
    "tensor": _DATA, "array": _DATA, "as_tensor": _DATA, "from_numpy": _DATA, "arrays": _DATA,
    "float32": "ct.f32", "float16": "ct.f16", "half": "ct.f16", "bfloat16": "ct.bf16",
    "int32": "ct.i32", "int8": "ct.i8", "uint32": "ct.u32", "uint8": "ct.u8", "bool": "ct.bool_",
    "float64": _WHOLE, "int64": _WHOLE, "double": _WHOLE, "long": _WHOLE,
    "empty_like": _LIKE, "full_like": _LIKE, "ones_like": _LIKE, "zeros_like": _LIKE,
    "rand": _DRAWN, "randn": _DRAWN, "random": _DRAWN,
    "eye": "ct.asarray(np.eye(n, dtype=np.float32))",
    "linspace": "ct.asarray(np.linspace(a, b, n, dtype=np.float32))",
    "reshape": "x.reshape(...)", "flatten": "x.reshape(-1)", "ravel": "x.reshape(-1)",
    "transpose": "x.permute(...), or x.T for the last two axes", "permute": "x.permute(...)",
    "permute_dims": "x.permute(...)", "moveaxis": "x.permute(...)", "swapaxes": "x.permute(...)",
    "squeeze": "x.reshape(...)", "expand_dims": _NEW_AXIS, "unsqueeze": _NEW_AXIS,
    "cat": "ct.concat", "concatenate": "ct.concat", "take": "ct.gather",
    "mm": "ct.matmul", "bmm": "ct.matmul", "einsum": "ct.matmul of views by x.permute(...)",
    "argmin": "ct.argmax(-x)", "silu": "ct.swish", "power": "ct.pow", "expand": "ct.broadcast_to",
    "rint": "ct.round", "repeat_interleave": "ct.repeat",
    "multiply": "ct.mul", "subtract": "ct.sub", "negative": "ct.neg",
    "equal": "ct.eq", "not_equal": "ct.ne", "clamp": "ct.clip", "norm": "ct.sqrt(ct.sum(x * x))",
    "scaled_dot_product_attention": "ct.attention", "no_grad": _GRAPH, "inference_mode": _GRAPH,
    "compile": "ct.jit, or device.compile(fn, *examples)", "cuda": 'ct.device("cuda")',
    **dict.fromkeys(
        ("list_devices", "get_devices", "local_devices", "device_count", "is_available"),
        "ct.devices() has the names that ct.device takes",
    ),
    "default_device": "ct.device()", "get_default_device": "ct.device()",
    "Module": "ct.nn.Module", "Linear": "ct.nn.Linear",
    "std": "ct.sqrt(ct.var(x, axis))",
    "any": "ct.sum(x) > 0 of bools", "all": "ct.sum(~x) == 0 of bools",
    "unique": "NumPy's, of x.numpy()", "scatter_add": 'ct.scatter(..., reduce="add")',
    "synchronize": "ct.device(name).synchronize()", "grad": _GRAPH, "f64": _WHOLE, "i64": _WHOLE,
    "set_default_device": "CENTELLA_DEVICE names the device that ct.device() gives",
    "manual_seed": "nothing here is random", "save": "np.savez of x.numpy()",
    "Batcher": "ct.serving.Batcher",
    "SentenceTransformer": 'ct.load(name, task="embed")',
    "CrossEncoder": 'ct.load(name, task="classify")',
    "TextEmbedding": 'ct.load(name, task="embed")',
    **dict.fromkeys(("AutoModel", "pipeline"), "ct.load(name, task=...)"),
    **dict.fromkeys(
        ("AutoModelForCausalLM", "LLM", "Llama"), 'ct.load(name, task="generate")'
    ),
    **dict.fromkeys(("WhisperModel", "load_model"), 'ct.load(name, task="transcribe")'),
    "AutoTokenizer": "ct.load(name).tokenizer",
    **dict.fromkeys(("IndexFlatIP", "IndexFlatL2", "IndexFlat", "IndexIVFFlat"), _INDEX),
    **dict.fromkeys(("IndexHNSWFlat", "index_factory"), _INDEX),
    **dict.fromkeys(("read_index", "load_index"), 'ct.Index.open("vectors.npy")'),
    "write_index": 'np.save("vectors.npy", vectors), then ct.Index.open("vectors.npy")',
    **dict.fromkeys(("semantic_search", "util"), _SEARCH),
    **dict.fromkeys(("normalize_L2", "normalize"), "ct.l2_normalize(x)"),
    **dict.fromkeys(("cos_sim", "dot_score"), "model.similarity(a, b) of an Embedder"),
}  # fmt: skip
OF_TENSOR: dict[str, str] = {
    **{name: f"ct.{name}(x)" for name in sorted(FUNCTIONS)},
    "argmin": "ct.argmax(-x)", "clamp": "ct.clip(x, low, high)",
    "transpose": "x.permute(...), or x.T for the last two axes", "t": "x.T", "mT": "x.T",
    "flatten": "x.reshape(-1)", "ravel": "x.reshape(-1)", "view": "x.reshape(...)",
    "squeeze": "x.reshape(...)", "unsqueeze": _NEW_AXIS, "expand": "ct.broadcast_to(x, shape)",
    "cpu": 'x.to("cpu")', "cuda": 'x.to("cuda")', "to_device": "x.to(device)",
    "float": 'x.astype("f32")', "half": 'x.astype("f16")', "int": 'x.astype("i32")',
    "bool": 'x.astype("bool")', "type": "x.astype(dtype)", "to_numpy": "x.numpy()",
    "dim": "x.ndim", "numel": "x.size", "itemsize": "x.dtype.itemsize", "strides": "x.spec.strides",
    "stride": "x.spec.strides", "long": _WHOLE, "double": _WHOLE, "is_cuda": "x.device",
    "masked_fill": "ct.where(mask, value, x)", "data": "x.numpy() copies it, x.native has it",
    "clone": "x.copy()", "detach": _GRAPH, "backward": _GRAPH, "grad": _GRAPH,
    "requires_grad": _GRAPH, "assign": "a Tensor does not change: ct.State(x) does",
}  # fmt: skip
OF_LAYER: dict[str, str] = {
    "load_state_dict": "module.load_parameters(tensors, device=...) takes arrays or a state_dict()",
    "parameters": "module.named_parameters(), or module.state_dict()",
    "children": "module.named_modules()",
    "modules": "module.named_modules()",
    **dict.fromkeys(
        ("to", "cuda", "cpu", "half", "float", "bfloat16"),
        "load_parameters(tensors, device=..., dtype=...) says where parameters go and as what",
    ),
    **dict.fromkeys(("eval", "train", "requires_grad_", "zero_grad"), _GRAPH),
    "register_parameter": "self.weight = nn.parameter(...)",
    "register_buffer": "a Tensor or a State that is an attribute",
}
# Of other libraries' models, and of models for another task.
OF_MODEL: dict[str, str] = {
    "encode": 'ct.load(..., task="embed") gives a model that embeds',
    **dict.fromkeys(
        ("rank", "predict", "classify"), 'ct.load(..., task="classify") gives one of a classifier'
    ),
    **dict.fromkeys(
        ("generate", "chat", "stream"), 'ct.load(..., task="generate") gives a model that generates'
    ),
    "transcribe": 'ct.load(..., task="transcribe") gives a model of speech',
    **dict.fromkeys(
        ("complete", "create_completion", "create_chat_completion", "generate_stream", "ask"),
        "model.generate(prompt), model.stream(prompt) and model.chat(messages) of a Generator",
    ),
    "tokenize": "model.tokenizer.encode(texts)", "decode": "model.tokenizer.decode(ids)",
    "device": "model.model.device",
    **dict.fromkeys(("to", "cuda", "cpu", "half"), "ct.load(..., device=..., dtype=...)"),
    **dict.fromkeys(("eval", "train", "fit"), _GRAPH),
    **dict.fromkeys(("save", "save_pretrained", "push_to_hub"), _READ_ONLY),
    **dict.fromkeys(("from_pretrained", "from_folder", "load"), "ct.load(path)"),
    **dict.fromkeys(("close", "unload", "free"), "its memory is free when nothing refers to it"),
}  # fmt: skip
# Of sentence-transformers' SentenceTransformer and CrossEncoder.
OF_EMBEDDER: dict[str, str] = {
    **OF_MODEL,
    **dict.fromkeys(
        ("max_seq_length", "get_max_seq_length"),
        "model.config.max_length; to change it: "
        "model.config = msgspec.structs.replace(model.config, max_length=256)",
    ),
    "truncate_dim": "encode(..., dim=256)",
    **dict.fromkeys(
        ("get_sentence_embedding_dimension", "get_embedding_dimension", "embedding_dimension"),
        "model.dim",
    ),
    "prompts": "model.config.prompts", "default_prompt_name": "model.config.default_prompt",
    "similarity_fn_name": "model.config.similarity",
    "similarity_pairwise": "(a * b).sum(1) of normalised vectors",
    **dict.fromkeys(
        ("compute_score", "compute_lexical_matching_score", "colbert_score"),
        "model.similarity(a, b) of two outputs of embed(texts, outputs)",
    ),
    **dict.fromkeys(("encode_queries", "embed_query"), "model.encode_query(texts)"),
    **dict.fromkeys(("encode_corpus", "embed_documents"), "model.encode_document(texts)"),
    **dict.fromkeys(
        ("encode_multi_process", "start_multi_process_pool", "stop_multi_process_pool"),
        'ct.load(..., devices="all") has the model on every device',
    ),
    **dict.fromkeys(
        ("search", "similarity_search"), "ct.Index(model.encode(texts)).search(queries, k=10)"
    ),
}  # fmt: skip
# Of the indexes of FAISS and usearch, and of the tables of LanceDB and Chroma.
OF_INDEX: dict[str, str] = {
    **dict.fromkeys(
        ("save", "write", "write_index", "serialize", "to_file"),
        'an Index writes no file: np.save("vectors.npy", vectors), then '
        'ct.Index.open("vectors.npy")',
    ),
    **dict.fromkeys(
        ("load", "read", "restore", "read_index", "from_file"), 'ct.Index.open("vectors.npy")'
    ),
    **dict.fromkeys(
        ("add", "add_items", "add_with_ids", "insert", "upsert", "update", "delete", "remove",
         "remove_ids", "reset"),
        "an Index does not change: ct.Index(vectors) of all of them makes another",
    ),
    **dict.fromkeys(("train", "is_trained", "build", "create_index"), "an Index has no training"),
    **dict.fromkeys(
        ("query", "knn", "knn_query", "kneighbors", "nearest", "get_nns_by_vector",
         "similarity_search"),
        "index.search(queries, k=10)",
    ),
    "range_search": "index.search(queries, k), and of its rows those with scores you want",
    **dict.fromkeys(("ntotal", "count", "count_rows", "size"), "len(index)"),
    **dict.fromkeys(("d", "dim", "ndim", "dimension"), "index.shape[1]"),
    **dict.fromkeys(
        ("vectors", "reconstruct", "reconstruct_n", "get", "to_pandas", "to_arrow"),
        "keep the array that the Index is made of: it gives no vectors back",
    ),
    "metric": "scores are dot products",
    **dict.fromkeys(("to", "cuda", "cpu"), "ct.Index(vectors, device=...)"),
}  # fmt: skip
OF_MATCHES: dict[str, str] = {
    **dict.fromkeys(("ids", "indices", "labels", "keys", "index"), "matches.rows"),
    **dict.fromkeys(("distances", "similarities", "D"), "matches.scores, the largest first"),
    **dict.fromkeys(("texts", "documents"), "index.texts[row] for each of matches.rows"),
    **dict.fromkeys(("limit", "top_k"), "index.search(queries, k=5)"),
    **dict.fromkeys(
        ("to_list", "to_pandas", "to_arrow"), "matches.scores and matches.rows are NumPy's"
    ),
    **dict.fromkeys(("metric", "where"), "index.search compares each query with all vectors"),
}
# Of the engines of vLLM and llama.cpp's server.
OF_SCHEDULER: dict[str, str] = {
    **dict.fromkeys(
        ("generate", "add_request", "create_completion", "chat", "stream", "enqueue"),
        "scheduler.submit(prompt, max_new_tokens=...) gives a Request",
    ),
    **dict.fromkeys(("abort", "abort_request", "cancel"), "request.cancel()"),
    **dict.fromkeys(("shutdown", "stop", "aclose"), "scheduler.close()"),
    "start": "a Scheduler computes from the first submit on",
    "has_unfinished_requests": "scheduler.running or scheduler.waiting",
}
OF_REQUEST: dict[str, str] = {
    **dict.fromkeys(("text", "ids", "finish", "outputs"), "request.result() has it, at its end"),
    **dict.fromkeys(("wait", "get", "join"), "request.result(timeout=None)"),
    **dict.fromkeys(("stream", "pieces"), "for piece in request"),
    **dict.fromkeys(("abort", "close"), "request.cancel()"),
    **dict.fromkeys(("finished", "is_done"), "request.done()"),
}
OF_STREAM: dict[str, str] = {
    **dict.fromkeys(("text", "content"), '"".join(stream); at its end stream.result.text'),
    **dict.fromkeys(("ids", "tokens", "finish"), "stream.result has .ids and .finish at its end"),
}
_REDUCED = {"add": "ct.sum(x)", "maximum": "ct.max(x)", "minimum": "ct.min(x)"}
_OPERATORS = {**REFLECTED, "matmul": "__rmatmul__"}
_OF_NUMPY = {"absolute": "abs", "fabs": "abs", "negative": "neg", "power": "pow", "rint": "round"}


def module_missing(name: str) -> AttributeError:
    """The error for a name that `centella` has not; with what to write, where that is known."""
    return _missing("module 'centella'", sys.modules["centella"], name, OF_MODULE)


def tensor_getattr(tensor: Any, name: str) -> Any:
    """The `__getattr__` of a Tensor.

    Raises:
        AttributeError: always; as `module_missing`.
    """
    hints = OF_TENSOR
    if name.endswith("_") and not name.startswith("_"):  # add_, copy_, ... of torch
        hints = {name: "a Tensor does not change; ct.State(x) does"}
    raise _missing("'Tensor' object", tensor, name, hints)


def layer_getattr(layer: Any, name: str) -> Any:
    """The `__getattr__` of a Module: as of a Tensor."""
    raise _missing(f"{type(layer).__name__!r} object", layer, name, OF_LAYER)


def matches_getattr(matches: Any, name: str) -> Any:
    """The `__getattr__` of Matches: as of a Tensor."""
    raise _missing("'Matches' object", matches, name, OF_MATCHES)


class _HintedType(type):
    """Answers names that are asked of a class, as `Index.load`, as those of its objects."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            raise _missing(f"type object {cls.__name__!r}", cls, name, cls._hints)


class Hinted(metaclass=_HintedType):
    """What answers the names of other libraries, also where they are set: with ours."""

    _hints: ClassVar[dict[str, str]] = OF_EMBEDDER
    _instead: ClassVar[str] = "call ct.load where it is needed"  # of a copy, or of a pickle

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: expected to stay in its process, got a copy or pickle of it; "
            f"{self._instead}"
        )

    if not TYPE_CHECKING:  # which is to say itself what an object has not

        def __getattr__(self, name: str) -> Any:
            raise _missing(f"{type(self).__name__!r} object", self, name, self._hints)

        def __setattr__(self, name: str, value: Any) -> None:
            if name in self._hints and not hasattr(type(self), name):
                raise _missing(f"{type(self).__name__!r} object", self, name, self._hints)
            object.__setattr__(self, name, value)


def _missing(where: str, thing: Any, name: str, hints: dict[str, str]) -> AttributeError:
    text = f"{where} has no attribute {name!r}"
    if name in hints:
        return AttributeError(f"{text}: {hints[name]}")
    return AttributeError(text, name=name, obj=thing)  # Python may know one like it


def numpy_ufunc(ufunc: Any, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The `__array_ufunc__` of a Tensor: operators are ours, functions are refused.

    Raises:
        DTypeError: names the function here that stands for NumPy's.
    """
    answer = reflected(ufunc, method, inputs, options, _OPERATORS)
    if answer is not NotImplemented:
        return answer
    name = ufunc.__name__
    ours = _OF_NUMPY.get(name, name)
    if method == "reduce" and name in _REDUCED:
        hint = _REDUCED[name]
    elif name in _OPERATORS:
        hint = "the operator of Python, between Tensors"
    elif ours in FUNCTIONS:
        hint = f"ct.{ours}(x)"
    else:
        hint = "x.numpy() is one"
    raise DTypeError(f"np.{name} takes arrays, got a Tensor: {hint}")
