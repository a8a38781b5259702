"""Keys and values of a text that is all there, in the place of a cache."""

from __future__ import annotations

from centella.tensors.creation import arange
from centella.tensors.functional import attention, embedding, rms_norm, rope, where
from centella.tensors.tensor import Tensor


def last_states(x: Tensor, lengths: Tensor) -> Tensor:
    """Of states [batch, seq_len, hidden] those of the last tokens, [batch, hidden].

    Args:
        lengths: [batch] i32; of a text without tokens it is the first state. Of states
            [tokens, hidden] of texts end to end offsets [batch + 1] i32; of none without tokens.
    """
    if x.ndim == 2:
        return embedding(lengths[1:] - 1, x)
    batch, seq_len, hidden = x.shape
    last = where(lengths > 0, lengths - 1, 0) + arange(batch, device=x.device) * seq_len
    return embedding(last, x.reshape(batch * seq_len, hidden))


class OnePass:
    """Keys and values of one pass through the layers, in the place of a `KVCache`.

    Args:
        kv_heads: heads of keys; head_dim: columns of each.
        lengths: [batch] i32, tokens of each text, whose keys count.
        positions: None; of texts end to end i32 [1, tokens], of each token in its text, and then
            `lengths` are offsets [texts + 1] i32.
        causal: whether a query sees the keys before it alone.
    """

    def __init__(
        self, kv_heads: int, head_dim: int, lengths: Tensor, positions: Tensor | None = None, *,
        causal: bool = True,
    ) -> None:  # fmt: skip
        self._kv_heads, self._head_dim = kv_heads, head_dim
        self._lengths: Tensor | None = lengths if positions is None else None
        self._offsets: Tensor | None = None if positions is None else lengths
        self._positions, self._causal = positions, causal
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append_qkv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, layer: int = 0, *,
        qk_norm: Tensor | None = None, eps: float = 1e-6,
    ) -> Tensor:  # fmt: skip
        """As `KVCache.append_qkv`."""
        kv, dim = self._kv_heads, self._head_dim
        x = qkv.reshape(*qkv.shape[:2], qkv.shape[2] // dim, dim).permute(0, 2, 1, 3)
        q, k, v = x[:, : -2 * kv], x[:, -2 * kv : -kv], x[:, -kv:]
        if qk_norm is not None:
            q, k = rms_norm(q, qk_norm[0], eps), rms_norm(k, qk_norm[1], eps)
        self._layers[layer] = rope(k, cos, sin, self._positions), v
        return rope(q, cos, sin, self._positions)

    def attend(
        self, q: Tensor, layer: int = 0, *, scale: float | None = None, window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """As `KVCache.attend`; the layer's keys and values are let go."""
        k, v = self._layers.pop(layer)
        return attention(
            q, k, v, lengths=self._lengths, offsets=self._offsets, causal=self._causal, scale=scale,
            window=window, softcap=softcap,
        )  # fmt: skip

    def attend_qkv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, layer: int = 0, *,
        qk_norm: Tensor | None = None, eps: float = 1e-6, scale: float | None = None,
        window: int | None = None, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """As `KVCache.attend_qkv`."""
        q = self.append_qkv(qkv, cos, sin, layer, qk_norm=qk_norm, eps=eps)
        return self.attend(q, layer, scale=scale, window=window, softcap=softcap)
