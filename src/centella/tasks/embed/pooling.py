"""From token states to a vector: the modules of a folder after its transformer.

Source: the folder format of sentence-transformers: modules.json lists Transformer, Pooling, Dense,
Normalize; config_sentence_transformers.json has the prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from msgspec import Struct

from centella.dtypes import f32
from centella.errors import DTypeError, ShapeError, WeightsError
from centella.nn import Linear, Module
from centella.nn.one_pass import last_states
from centella.runtime.device import Device
from centella.tensors.arguments import flag, one_of, whole
from centella.tensors.creation import arange
from centella.tensors.functional import (
    concat,
    gather,
    l2_normalize,
    matmul,
    max,
    mean_pool,
    sqrt,
    where,
)
from centella.tensors.tensor import Tensor
from centella.weights import open_checkpoint
from centella.weights.folder import max_length, read_modules
from centella.weights.model_files import inside, read_json, show

# In the order of flags; a list has its own.
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken")
OF_ROWS = ("cls", "mean", "lasttoken")  # those of texts end to end, too
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
LARGEST = 2**31  # numbers of a vector
LOWEST = -1e30  # below every state
DENSE_ACTIVATIONS = {
    "Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu",
}  # fmt: skip


class DenseConfig(Struct, frozen=True):
    """A Dense module: f(x W^T + b).

    Attributes:
        folder: where its weights are.
        activation: "" for none, else a name that `ct.linear` takes.
    """

    folder: str
    in_features: int
    out_features: int
    bias: bool = True
    activation: str = ""


class EmbedderConfig(Struct, frozen=True):
    """How texts become token ids, and token states a vector.

    Attributes:
        max_length: tokens that a text is cut at, special ones counted.
        pooling: of `POOLINGS`: "mean" over the text's tokens, "cls": the first token's state, "max"
            of each number, "lasttoken", "weightedmean" (token i counts i times), "mean_sqrt_len"
            (the sum over sqrt(tokens)); or several, as "cls+mean", side by side in this order.
        normalize: whether vectors have length 1.
        lower_case: whether texts are lower-cased before they are tokenised.
        dense: products after the pooling.
        prompts: what is put before a text, by name; default_prompt: the name for every text.
        similarity: of two vectors, one of `SIMILARITIES`.
    """

    max_length: int
    pooling: str = "mean"
    normalize: bool = False
    lower_case: bool = False
    dense: tuple[DenseConfig, ...] = ()
    prompts: Mapping[str, str] = {}
    default_prompt: str | None = None
    similarity: str = "cosine"

    @classmethod
    def from_folder(cls, folder: str | PathLike[str]) -> EmbedderConfig:
        """Read `modules.json` and what it names; without it: mean, not normalised.

        Raises:
            WeightsError: a module or pooling that this library does not have.
        """
        root = Path(folder)
        pooling, normalize, file = "mean", False, root / "modules.json"
        dense: list[DenseConfig] = []
        for module in read_modules(root):
            kind = str(module.get("type", "")).rpartition(".")[2]
            if normalize and kind not in ("Normalize", "Dropout"):
                raise WeightsError(f"{file}: expected Normalize after {kind}, got it before")
            where = inside(root, module.get("path", ""), f"{file}: path")
            if kind == "Pooling":
                pooling = _pooling(where / "config.json")
            elif kind == "Dense":
                dense.append(_dense(where))
            elif kind == "Normalize":
                normalize = True
            elif kind not in ("Transformer", "Dropout"):
                raise WeightsError(
                    f"{file}: expected modules Transformer, Pooling, Dense, Normalize, "
                    f"got {show(module.get('type'))}"
                )
        lower = bool(read_json(root / "sentence_bert_config.json").get("do_lower_case", False))
        return cls(
            max_length(root), pooling, normalize, lower, tuple(dense), **_prompts(root)
        )  # fmt: skip

    def check(self) -> None:
        """Refuse what no vectors can be made with.

        Raises:
            ShapeError: another pooling, or a length below 1; DTypeError: a flag that is none.
        """
        for mode in self.pooling.split("+"):
            one_of("Embedder", "pooling", mode, POOLINGS)
        flag("Embedder", "config.normalize", self.normalize)
        whole("Embedder", "config.max_length", self.max_length, 1)

    def kept(self, asked: int | None, dim: int) -> int | None:
        """Numbers that are kept of a vector of `dim`, None for all.

        Raises:
            ShapeError: more than there are; DTypeError: no whole number.
        """
        if asked is None or whole("encode", "dim", asked, 1) == dim:
            return None
        if asked > dim:
            raise ShapeError(f"encode: expected dim of 1 to {dim}, got {asked}")
        return int(asked)

    def normalizes(self, op: str, asked: bool | None) -> bool:
        """Whether vectors get length 1: as asked, or as the folder says."""
        return self.normalize if asked is None else flag(op, "normalize", asked)

    def width(self, hidden: int) -> int:
        """Numbers of a vector, from states of so many.

        Raises:
            WeightsError: a Dense module that takes another number of them.
        """
        width = hidden * len(self.pooling.split("+"))
        for dense in self.dense:
            if dense.in_features != width:
                raise WeightsError(
                    f"{dense.folder}: in_features: expected {width}, the numbers before it, "
                    f"got {dense.in_features}"
                )
            width = dense.out_features
        return width

    def prompt(self, op: str, name: str | None, text: str | None, *usual: str) -> str:
        """What is put before each text.

        Args:
            name, text: as the caller gave them, at most one.
            usual: names of which the first that the folder has is taken.

        Raises:
            ShapeError: both, or a name that the folder does not have.
            DTypeError: a prompt that is no str.
        """
        if name is not None and text is not None:
            raise ShapeError(f"{op}: expected prompt or prompt_name, got both")
        if text is not None:
            if not isinstance(text, str):
                raise DTypeError(f"{op}: expected str for prompt, got {type(text).__name__}")
            return text
        if name is None:
            name = next((n for n in usual if n in self.prompts), self.default_prompt)
        if name is None:
            return ""
        if name not in tuple(self.prompts):  # no look-up by hash: it may be a list
            known = _one_of(sorted(self.prompts))
            raise ShapeError(f"{op}: prompt_name: expected {known}, got {name!r}")
        return self.prompts[name]


class Dense(Module):
    """A product after the pooling, with its activation."""

    def __init__(self, config: DenseConfig) -> None:
        self.linear: Linear = Linear(config.in_features, config.out_features, config.bias)
        self.activation: str = config.activation

    @classmethod
    def load(cls, config: DenseConfig, device: Device) -> Dense:
        """With its weights, f32.

        Raises:
            WeightsError: there are none, or of another shape.
        """
        dense = cls(config)
        tensors = open_checkpoint(Path(config.folder))
        dense.load_parameters(tensors, device=device, dtype=f32, origin=config.folder)
        return dense

    def forward(self, x: Tensor) -> Tensor:
        """[batch, in_features] to [batch, out_features]."""
        return self.linear(x, activation=self.activation or None)


def pooled(pooling: str, states: Tensor, lengths: Tensor) -> Tensor:
    """Token states [batch, seq_len, hidden] and lengths [batch] to f32 [batch, modes * hidden].

    Of texts end to end: states [tokens, hidden] and offsets [batch + 1], of the modes `OF_ROWS`.
    """
    parts = [_mode(mode, states, lengths).astype(f32) for mode in pooling.split("+")]
    return parts[0] if len(parts) == 1 else concat(parts, -1)


def finished(x: Tensor, dim: int | None, normalize: bool) -> Tensor:
    """Vectors [batch, dim], cut and then of length 1 if that is asked, in memory of their own."""
    cut = x if dim is None else x[:, :dim]
    return l2_normalize(cut) if normalize else cut.contiguous()


def _mode(mode: str, x: Tensor, lengths: Tensor) -> Tensor:
    """One pooling: [batch, hidden]."""
    if mode == "mean":
        return mean_pool(x, lengths)
    if mode == "lasttoken":
        return last_states(x, lengths)
    if mode == "cls":
        return x[:, 0] if x.ndim == 3 else gather(x, lengths[:-1])
    batch, seq_len, hidden = x.shape
    at = arange(seq_len, device=x.device)
    real = at < lengths.reshape(batch, 1)  # [batch, seq_len]
    if mode == "max":
        return max(where(real.reshape(batch, seq_len, 1), x.astype(f32), LOWEST), 1)
    tokens = lengths.reshape(batch, 1).astype(f32)
    if mode == "mean_sqrt_len":
        shares = where(real, 1.0 / sqrt(where(tokens > 0, tokens, 1.0)), 0.0)
    else:  # token i counts i + 1 times, of 1 + 2 + ... + n
        total = where(tokens > 0, tokens * (tokens + 1.0) * 0.5, 1.0)
        shares = where(real, (at.astype(f32) + 1.0) / total, 0.0)
    return matmul(shares.reshape(batch, 1, seq_len), x.astype(f32)).reshape(batch, hidden)


def _pooling(file: Path) -> str:
    """The poolings that are on: `pooling_mode`, or a flag for each in older folders."""
    config = read_json(file)
    named = config.get("pooling_mode")
    flags = [k.removeprefix("pooling_mode_") for k, v in config.items() if v is True]
    modes = [f.removesuffix("_token") if f == "cls_token" else f.removesuffix("_tokens")
             for f in flags if f not in ("include_prompt",)]  # fmt: skip
    modes.sort(key=lambda mode: POOLINGS.index(mode) if mode in POOLINGS else -1)
    if named is not None:
        modes = [str(m).removesuffix("_tokens") for m in
                 (named if isinstance(named, list) else [named])]  # fmt: skip
    if not modes or any(m not in POOLINGS for m in modes):
        got = show(", ".join(map(str, modes)) or "none")[1:-1]
        raise WeightsError(f"{file}: pooling: expected one of {', '.join(POOLINGS)}, got {got}")
    if config.get("include_prompt") is False and modes != ["lasttoken"]:
        raise WeightsError(f"{file}: include_prompt: expected true, got False")
    return "+".join(modes)


def _dense(folder: Path) -> DenseConfig:
    """A Dense module's config."""
    file = folder / "config.json"
    config = read_json(file)
    inner, outer = config.get("in_features"), config.get("out_features")
    for size in (inner, outer):
        if type(size) is not int or not 0 < size < LARGEST:
            raise WeightsError(
                f"{file}: in_features, out_features: expected whole numbers over 0, "
                f"got {show(inner)}, {show(outer)}"
            )
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = name.rpartition(".")[2]
    if kind not in DENSE_ACTIVATIONS:
        raise WeightsError(
            f"{file}: activation_function: expected one of {', '.join(DENSE_ACTIVATIONS)}, "
            f"got {show(name)}"
        )
    for key, usual in (("use_residual", False), ("module_input_name", "sentence_embedding")):
        if config.get(key, usual) != usual:
            raise WeightsError(f"{file}: {key}: expected {usual}, got {show(config[key])}")
    bias = config.get("bias", True) is not False
    return DenseConfig(str(folder), int(inner or 0), int(outer or 0), bias, DENSE_ACTIVATIONS[kind])


def _one_of(names: Iterable[str]) -> str:
    known = ", ".join(names)
    return f"one of {known}" if known else "none, as the folder has no prompts"


def _prompts(root: Path) -> dict[str, Any]:
    """Prompts, the one for every text, and the similarity."""
    file = root / "config_sentence_transformers.json"
    values = read_json(file)
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise WeightsError(f"{file}: prompts: expected texts by name, got {show(prompts)}")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise WeightsError(
            f"{file}: default_prompt_name: expected {_one_of(prompts)}, got {show(default)}"
        )
    similarity = values.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise WeightsError(
            f"{file}: similarity_fn_name: expected one of {', '.join(SIMILARITIES)}, "
            f"got {show(similarity)}"
        )
    return {"prompts": prompts, "default_prompt": default, "similarity": similarity}
