"""Attention: sums of values by the scores of their keys."""

from __future__ import annotations

import math

from centella.errors import ShapeError
from centella.ops.attention.masks import misshapen
from centella.specs import Shape
from centella.tensors.arguments import check_tensors, flag, real, variant_attrs, whole
from centella.tensors.functional.move import pad
from centella.tensors.tensor import Tensor, apply_with

__all__ = ["attention"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    mask: Tensor | None = None,
    starts: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    offsets: Tensor | None = None,
    blocks: Tensor | None = None,
    scales: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    variant: str | None = None,
) -> Tensor:
    """Scaled dot-product attention, without a score matrix in memory.

    Args:
        q: [batch, heads, q_len, head_dim]; k, v: [batch, kv_heads, kv_len, head_dim]. Heads of v
            may have a size of their own: the smaller ones are padded with zeros, which copies them.
        lengths: [batch] i32, keys of each sequence that count.
        key_mask: [batch, kv_len] bool or integer, nonzero where a key counts.
        mask: [batch or 1, heads or 1, q_len or 1, kv_len or 1], of which leading extents may be
            left out ([q_len, kv_len] serves all heads); of floats, which are added to the scaled
            scores, or of bools, True where a query sees a key.
        starts: [batch] i32, where query 0 of each sequence stands: query i sees keys up to
            starts + i. With `lengths` that is what a buffer of kv_len keys needs, filled in part.
        sinks: [heads], floats: the score of one more key of each head, whose value is 0 (Xiao et
            al. 2023; gpt-oss).
        bias: [heads or 1, n] floats, n odd: what is added to a scaled score by the distance of the
            key from the query: bias[h, n // 2 + key - query], of further ones the first or last of
            a row. A query's position is as for `window`.
        offsets: [texts + 1] i32, ascending, of which the first counts as 0: texts lie end to end in
            q, k and v of batch 1, text i from offsets[i] to offsets[i + 1], and each is a sequence
            of its own. Rows behind the last text get zeros. Results for offsets that descend are
            undefined. Besides it only `bias`, `sinks`, `causal`, `window` and `softcap`.
        blocks: [batch, n] i32: the keys and values of a sequence lie in these blocks of 64, and k
            and v are pools [kv_heads, blocks, 64, head_dim]. Key j is row j % 64 of block
            blocks[b, j // 64], and kv_len is 64 n. An entry that is no block counts as the last.
        scales: f32, of the shape of k with 2 in the place of head_dim: k and v are i8, and row j
            of the keys is k[..., j, :] scales[..., j, 0], of the values v[..., j, :]
            scales[..., j, 1]: what a `KVCache` of dtype i8 has. q has any float dtype.
        causal: query i sees keys up to i + kv_len - q_len; instead of `starts`.
        window: a query sees the keys of less than so many positions away: with `starts` or `causal`
            the last `window` ones, its own included (`sliding_window` of decoders), else those on
            both sides (of encoders with a distance of at most w: w + 1). Query i stands where
            `starts` or `causal` says.
        softcap: c, of which a scaled score is made c tanh(score / c), before a mask is added.
        scale: default 1 / sqrt(head_dim).
        variant: force a kernel ("tiled", "stream", "split", "mma", "wgmma", "split_mma",
            "cluster_mma", "ring"), for tests and benchmarks.

    Returns:
        [batch, heads, q_len, head_dim of v]; a view of memory in [batch, q_len, heads, head_dim].
        A query with no key gives zeros.

    Raises:
        ShapeError, DTypeError: for shapes, dtypes or numbers that do not fit these; for causal and
            starts.
        LimitError: as for `matmul`.
    """
    check_tensors("attention", q, k, v)
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ShapeError(
            f"attention: expected rank 4, got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    keys = k.shape[2]
    if blocks is not None:
        check_tensors("attention", blocks)
        keys *= blocks.shape[-1] if blocks.ndim else 0
    if mask is not None:
        mask = _broadcast(mask, (*q.shape[:3], keys))
    masks = {"lengths": lengths, "key_mask": key_mask, "mask": mask, "starts": starts,
             "sinks": sinks, "bias": bias, "offsets": offsets, "blocks": blocks,
             "scales": scales}  # fmt: skip
    attrs = variant_attrs("attention", variant, causal=flag("attention", "causal", causal))
    attrs |= score_attrs("attention", q.shape[-1], scale, window, softcap)
    if starts is None and attrs.get("window", 0) >= max(q.shape[2], keys):
        attrs.pop("window", None)  # all is within it
    size = v.shape[3]
    if size != q.shape[3]:
        most = max(size, q.shape[3])
        q, k, v = (pad(x, [(0, 0)] * 3 + [(0, most - x.shape[3])]) for x in (q, k, v))
    y = apply_with("attention", (q, k, v), "masks", masks, attrs).permute(0, 2, 1, 3)
    return y if size == y.shape[3] else y[..., :size]


def score_attrs(
    name: str, head_dim: int, scale: float | None, window: int | None, softcap: float | None
) -> dict[str, float]:
    """The attributes of attention that its scores depend on, of an op `name`.

    Raises:
        ShapeError: a window below 1, or a softcap that is not finite and above 0.
    """
    default = 1.0 / math.sqrt(max(head_dim, 1))
    attrs = {"scale": default if scale is None else real(name, "scale", scale)}
    if window is not None:
        attrs["window"] = whole(name, "window", window, 1)
    if softcap is not None:
        attrs["softcap"] = real(name, "softcap", softcap)
        if not 0.0 < attrs["softcap"] < math.inf:
            raise ShapeError(f"{name}: expected a finite softcap above 0, got {softcap}")
    return attrs


def _broadcast(mask: Tensor, scores: Shape) -> Tensor:
    """A mask with the rank of the scores, to which it broadcasts."""
    check_tensors("attention", mask)
    missing = len(scores) - mask.ndim
    own = scores[max(missing, 0) :]
    if missing < 0 or any(n not in (1, m) for n, m in zip(mask.shape, own, strict=True)):
        raise misshapen(scores, mask.shape)
    return mask[(None,) * missing] if missing else mask
