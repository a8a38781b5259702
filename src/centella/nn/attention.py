"""Attention as modules: of a sequence to itself, and to another."""

from __future__ import annotations

from collections.abc import Sequence

from centella.dtypes import f32
from centella.errors import ShapeError
from centella.nn.kv_cache import KVCache
from centella.nn.layers import LayerNorm, Linear
from centella.nn.module import Module
from centella.tensors.arguments import whole
from centella.tensors.functional import attention, concat, matmul, softmax
from centella.tensors.tensor import Tensor


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, seq_len, heads * head_dim] to [batch, heads, seq_len, head_dim]: a view."""
    batch, seq_len, width = x.shape
    return x.reshape(batch, seq_len, heads, width // heads).permute(0, 2, 1, 3)


def join_heads(x: Tensor) -> Tensor:
    """[batch, heads, seq_len, head_dim] to [batch, seq_len, heads * head_dim].

    A view of what `attention` returns.
    """
    batch, heads, seq_len, head_dim = x.shape
    return x.permute(0, 2, 1, 3).reshape(batch, seq_len, heads * head_dim)


class SelfAttention(Module):
    """softmax(q k^T / sqrt(head_dim)) v for each head; q, k and v come from one product.

    Args:
        width: of the input; num_heads: of the queries.
        num_kv_heads: of keys and values, default `num_heads`; head_dim: default width / num_heads.
        bias: of all four products; `unbiased` names those without ("k_proj", as in Whisper).

    Raises:
        ShapeError: heads that do not divide `width`, or `num_heads`.

    Parameters of a checkpoint: q_proj, k_proj, v_proj, out_proj.
    """

    def __init__(
        self, width: int, num_heads: int, *, num_kv_heads: int | None = None,
        head_dim: int | None = None, bias: bool = True, unbiased: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.num_heads: int = whole("SelfAttention", "num_heads", num_heads, 1)
        self.num_kv_heads: int = num_heads if num_kv_heads is None else num_kv_heads
        whole("SelfAttention", "num_kv_heads", self.num_kv_heads, 1)
        self.head_dim: int = width // num_heads if head_dim is None else head_dim
        if head_dim is None and width % num_heads:
            raise ShapeError(f"SelfAttention: expected {num_heads} heads to divide {width}")
        if num_heads % self.num_kv_heads:
            raise ShapeError(
                f"SelfAttention: expected num_kv_heads to divide {num_heads}, got {num_kv_heads}"
            )
        inner, kv = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        stacks = {"q_proj": inner, "k_proj": kv, "v_proj": kv}
        self.qkv: Linear = Linear(width, inner + 2 * kv, bias, stacks=stacks, unbiased=unbiased)
        self.out_proj: Linear = Linear(inner, width, bias)

    def forward(
        self, x: Tensor, *, lengths: Tensor | None = None, mask: Tensor | None = None,
        causal: bool = False, norm: LayerNorm | None = None, residual: Tensor | None = None,
        cache: KVCache | None = None, layer: int = 0,
    ) -> Tensor:  # fmt: skip
        """[batch, seq_len, width] to the same.

        Args:
            norm: of x, before the product.
            lengths: [batch] i32, tokens of each sequence; not with a cache, which has its own.
            mask: as `ct.attention` takes it.
            residual: added to the result, in the same launch.
            cache: the past; this step's keys and values are appended to its `layer`, and attention
                is causal over all of it.

        Raises:
            ShapeError: lengths and a cache.
            KVCacheFullError: there is no room in the cache.
        """
        if cache is not None and lengths is not None:
            raise ShapeError("SelfAttention: expected lengths or a cache, got both")
        qkv = split_heads(self.qkv(x, norm=norm), self.num_heads + 2 * self.num_kv_heads)
        last = self.num_heads + self.num_kv_heads
        q, k, v = qkv[:, : self.num_heads], qkv[:, self.num_heads : last], qkv[:, last:]
        if cache is None:
            y = attention(q, k, v, lengths=lengths, mask=mask, causal=causal)
        else:
            y = cache.append_attend(q, k, v, layer, mask=mask)
        return self.out_proj(join_heads(y), residual=residual)


class CrossAttention(Module):
    """Attention of a sequence to a memory, whose keys and values come from one product.

    Args: as for `SelfAttention`; memory_width: of the memory, default `width`.

    Raises:
        ShapeError: heads that do not divide `width`.
    """

    def __init__(
        self, width: int, num_heads: int, *, memory_width: int | None = None, bias: bool = True,
        unbiased: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        whole("CrossAttention", "num_heads", num_heads, 1)
        if width % num_heads:
            raise ShapeError(f"CrossAttention: expected {num_heads} heads to divide {width}")
        self.num_heads = num_heads
        stacks = {"k_proj": width, "v_proj": width}
        self.q_proj: Linear = Linear(width, width, bias)
        self.kv: Linear = Linear(
            memory_width or width, 2 * width, bias, stacks=stacks, unbiased=unbiased
        )
        self.out_proj: Linear = Linear(width, width, bias)

    def keys_values(self, memory: Tensor) -> Tensor:
        """Keys and values of a memory [batch, kv_len, memory_width]: computed once for many steps.

        Returns:
            [2, batch, heads, kv_len, head_dim]: keys, then values; a view of one product.
        """
        both = self.kv(memory)  # [batch, kv_len, 2 * width]
        batch, kv_len, width = both.shape
        shape = (batch, kv_len, 2, self.num_heads, width // (2 * self.num_heads))
        return both.reshape(*shape).permute(2, 0, 3, 1, 4)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, *, lengths: Tensor | None = None,
        norm: LayerNorm | None = None, residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[batch, seq_len, width] over keys and values of the memory, whose are the `lengths`.

        Args:
            norm: of x; residual: added to the result, in the same launch.
        """
        q = split_heads(self.q_proj(x, norm=norm), self.num_heads)
        y = attention(q, keys, values, lengths=lengths)
        return self.out_proj(join_heads(y), residual=residual)

    def weights(self, x: Tensor, keys: Tensor, heads: Sequence[int]) -> Tensor:
        """softmax(q k^T / sqrt(head_dim)) of some heads: f32 [batch, len(heads), seq_len, kv_len].

        With scores in memory: for alignment, where somebody looks at them.
        """
        q = split_heads(self.q_proj(x), self.num_heads)
        q = concat([q[:, h : h + 1] for h in heads], 1)
        k = concat([keys[:, h : h + 1] for h in heads], 1)
        scores = matmul(q, k.permute(0, 1, 3, 2), alpha=q.shape[-1] ** -0.5, dtype=f32)
        return softmax(scores, -1)
