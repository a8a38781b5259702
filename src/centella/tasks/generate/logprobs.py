"""Log-probabilities of the tokens of a step, beside them in one row of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from centella.dtypes import f32
from centella.errors import DTypeError, ShapeError
from centella.runtime.device import Device
from centella.tensors.creation import asarray
from centella.tensors.functional import concat, exp, gather, log, topk
from centella.tensors.functional import max as largest
from centella.tensors.functional import sum as total
from centella.tensors.tensor import Tensor
from centella.weights.model_files import show

Array = np.ndarray[Any, Any]
MOST = 20  # alternatives


class TokenLogprobs(Struct, frozen=True):
    """How likely a token was, by the model's own distribution.

    Natural logarithms of the softmax of the logits, in f32, before penalties, temperature, top_k,
    top_p and min_p: the same for every way to choose.

    Attributes:
        id: the token that was chosen.
        logprob: its log-probability.
        top: the most likely tokens and their log-probabilities, the likeliest first; as many as
            were asked for. The chosen one is among them only if it is that likely.
    """

    id: int
    logprob: float
    top: dict[int, float]


class Scores:
    """Computes the log-probabilities of a batch: of the chosen tokens and of the likeliest ones.

    Args:
        batch, vocab: extents of the logits.
        device: where they are.
    """

    def __init__(self, batch: int, vocab: int, device: Device) -> None:
        self._rows: Tensor = asarray(np.arange(batch, dtype=np.int32), device=device)

    def __call__(self, logits: Tensor, chosen: Tensor, k: int) -> Tensor:
        """Of logits f32 [b, vocab] and chosen tokens i32 [b], f32 [b, 2 + 2 k].

        Columns: the chosen token (f32 is exact for ids below 2^24) and its log-probability, the
        k likeliest tokens, and theirs.
        """
        b, vocab = logits.shape
        top = largest(logits, -1, keepdims=True)
        rest = log(total(exp(logits - top), -1, keepdims=True))
        at = self._rows * vocab + chosen
        own = gather(logits.reshape(b * vocab), at).reshape(b, 1)
        columns = [chosen.reshape(b, 1).astype(f32), own - top - rest]
        if k:
            values, ids = topk(logits, min(k, vocab))
            columns += [ids.astype(f32), values - top - rest]
        return concat(columns, axis=1)


def tokens_of(step: Array) -> Array:
    """The tokens [batch] of what a step sent: themselves, or the first column of `Scores`."""
    return step if step.ndim == 1 else step[:, 0].astype(np.int32)


def logprobs_of(step: Array, row: int) -> TokenLogprobs | None:
    """Those of a sequence in what a step sent; None where it has none."""
    if step.ndim == 1:
        return None
    chosen, own, *rest = step[row].tolist()
    k = len(rest) // 2
    return TokenLogprobs(int(chosen), own, dict(zip(map(int, rest[:k]), rest[k:], strict=True)))


def checked(op: str, logprobs: object) -> int | None:
    """How many alternatives are asked for; None: no log-probabilities.

    Raises:
        DTypeError: what is no whole number; ShapeError: more than `MOST`.
    """
    if logprobs is None:
        return None
    number = isinstance(logprobs, int | np.integer) and not isinstance(logprobs, bool)
    if not number:
        raise DTypeError(
            f"{op}: logprobs: expected how many alternatives, 0 for the chosen token alone, got "
            f"{show(logprobs)}"
        )
    if not 0 <= logprobs <= MOST:  # type: ignore[operator]
        raise ShapeError(f"{op}: logprobs: expected 0 to {MOST}, got {logprobs}")
    return int(logprobs)  # type: ignore[call-overload,no-any-return]
