"""What a model gives for each token of a text: a weight by its id, or a vector.

    sparse   max over the places of a token of relu(w x_i + b)
    multi    (W x_i + b) / |W x_i + b|, of every token but the first

Source: Chen et al. 2024, "BGE M3-Embedding"; w, W, b are in the files of `FILES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from centella.dtypes import Array, f32
from centella.nn import Linear
from centella.runtime.device import Device
from centella.tensors.functional import l2_normalize, relu
from centella.tensors.tensor import Tensor
from centella.weights.safetensors import StoredTensor

Sparse = dict[int, float]
FILES = {"sparse": "sparse_linear", "multi": "colbert_linear"}


def load_head(
    output: str, tensors: Mapping[str, StoredTensor], hidden: int, device: Device
) -> Linear:  # fmt: skip
    """A product on the device, f32.

    Raises:
        WeightsError: tensors that are missing or of another shape.
    """
    weight = tensors.get("weight")
    rows = 1 if output == "sparse" or weight is None or not weight.shape else weight.shape[0]
    head = Linear(hidden, rows, "bias" in tensors)
    origin = next((str(tensor.file) for tensor in tensors.values()), FILES[output])
    head.load_parameters(tensors, device=device, dtype=f32, origin=origin)
    return head


def of_tokens(output: str, head: Linear, states: Tensor) -> Tensor:
    """States [batch, seq_len, hidden] to weights [batch, seq_len] or vectors [.., seq_len, dim]."""
    x = head(states.astype(f32))
    return relu(x).reshape(states.shape[:2]) if output == "sparse" else l2_normalize(x)


def weights_by_id(ids: Sequence[int], weights: Array, left_out: frozenset[int]) -> Sparse:
    """The largest weight of each token of a text, of those over 0."""
    by_id: Sparse = {}
    for token, weight in zip(ids, weights[: len(ids)].tolist(), strict=True):
        if weight > by_id.get(token, 0.0) and token not in left_out:
            by_id[token] = weight
    return by_id


def vectors_by_token(ids: Sequence[int], vectors: Array) -> Array:
    """The vectors of a text's tokens, [tokens, dim], without the first's, which is no word."""
    return vectors[1 : len(ids)].copy()


def merged(parts: Sequence[Sparse]) -> Sparse:
    """The weights of a text from those of its pieces: the largest of each token."""
    largest: Sparse = {}
    for part in parts:
        for token, weight in part.items():
            largest[token] = max(weight, largest.get(token, 0.0))
    return largest
