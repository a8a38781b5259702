"""Transformer blocks: encoder, decoder, and the convolutions before an audio encoder.

Source: Vaswani et al. 2017, "Attention Is All You Need" (normalised after the residual); Xiong et
al. 2020, "On Layer Normalization in the Transformer Architecture" (before); Radford et al. 2022,
"Robust Speech Recognition via Large-Scale Weak Supervision" (the convolutions). Attributes carry
the names of Whisper and BART in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from centella.errors import ShapeError
from centella.nn.attention import CrossAttention, SelfAttention
from centella.nn.kv_cache import KVCache
from centella.nn.layers import Conv1d, LayerNorm, Linear
from centella.nn.module import Module, parameter
from centella.specs import Shape
from centella.tensors.tensor import Tensor

Memory = Tensor | tuple[Tensor, Tensor]  # keys and values
# Of a block: of its input, the norm of that and the residual, their sum.
Part = Callable[[Tensor, LayerNorm | None, Tensor], Tensor]


class _Block(Module):
    """What blocks have in common: self-attention, a feed-forward network, where norms stand."""

    def __init__(
        self, width: int, num_heads: int, inner: int, *, norm_first: bool = True,
        activation: str = "gelu", eps: float = 1e-5, bias: bool = True,
        unbiased: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.self_attn: SelfAttention = SelfAttention(
            width, num_heads, bias=bias, unbiased=unbiased
        )
        self.self_attn_layer_norm: LayerNorm = LayerNorm(width, eps)
        self.fc1: Linear = Linear(width, inner, bias)
        self.fc2: Linear = Linear(inner, width, bias)
        self.final_layer_norm: LayerNorm = LayerNorm(width, eps)
        self.norm_first = norm_first
        self.activation = activation

    def _add(self, part: Part, norm: LayerNorm, x: Tensor) -> Tensor:
        """x + part, where the norm is of the part's input or of the sum."""
        return part(x, norm, x) if self.norm_first else norm(part(x, None, x))

    def _feed_forward(self, x: Tensor) -> Tensor:
        """x + fc2(f(fc1(x)))."""
        return self._add(
            lambda y, norm, residual: self.fc2(
                self.fc1(y, self.activation, norm=norm), residual=residual
            ),
            self.final_layer_norm,
            x,
        )


class EncoderBlock(_Block):
    """Self-attention, then a feed-forward network, each with a residual and a norm.

    Args:
        width: of the states; num_heads: of the attention; inner: of the feed-forward network.
        norm_first: normalise the input of each part; else its sum with the residual.
        activation: between the two products; eps: of the norms.
        bias, unbiased: as for `SelfAttention`.
    """

    def forward(
        self, x: Tensor, *, lengths: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """[batch, seq_len, width] to the same.

        Args:
            lengths: [batch] i32, tokens of each sequence; mask: as `ct.attention` takes it.
        """
        x = self._add(
            lambda y, norm, residual: self.self_attn(
                y, lengths=lengths, mask=mask, norm=norm, residual=residual
            ),
            self.self_attn_layer_norm,
            x,
        )
        return self._feed_forward(x)


class DecoderBlock(_Block):
    """Causal self-attention, attention to a memory, then a feed-forward network.

    Args: as for `EncoderBlock`; memory_width: of the encoder's states, default `width`.
    """

    def __init__(
        self, width: int, num_heads: int, inner: int, *, memory_width: int | None = None,
        norm_first: bool = True, activation: str = "gelu", eps: float = 1e-5, bias: bool = True,
        unbiased: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(
            width, num_heads, inner, norm_first=norm_first, activation=activation, eps=eps,
            bias=bias, unbiased=unbiased,
        )  # fmt: skip
        self.encoder_attn: CrossAttention = CrossAttention(
            width, num_heads, memory_width=memory_width, bias=bias, unbiased=unbiased
        )
        self.encoder_attn_layer_norm: LayerNorm = LayerNorm(width, eps)

    def forward(
        self, x: Tensor, memory: Memory, *, cache: KVCache | None = None,
        layer: int = 0, lengths: Tensor | None = None, memory_lengths: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[batch, seq_len, width] to the same.

        Args:
            memory: keys and values of the encoder's states, as `encoder_attn.keys_values` gives;
                or a pair of them.
            cache: of the tokens before these; without it x is the whole sequence.
            lengths: [batch] i32, tokens of x that count; not with a cache, which has its own.
            memory_lengths: [batch] i32, places of the memory that count.
            mask: of the self-attention, as `ct.attention` takes it.

        Raises:
            ShapeError: lengths and a cache.
            KVCacheFullError: there is no room in the cache.
        """
        x = self.attend_past(x, cache=cache, layer=layer, lengths=lengths, mask=mask)
        return self.attend_memory(x, memory, memory_lengths)

    def attend_past(
        self, x: Tensor, *, cache: KVCache | None = None, layer: int = 0,
        lengths: Tensor | None = None, mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The first part: x and the self-attention; arguments as of `forward`."""
        return self._add(
            lambda y, norm, residual: self.self_attn(
                y, lengths=lengths, mask=mask, causal=cache is None, norm=norm, residual=residual,
                cache=cache, layer=layer,
            ),
            self.self_attn_layer_norm,
            x,
        )  # fmt: skip

    def attend_memory(self, x: Tensor, memory: Memory, lengths: Tensor | None = None) -> Tensor:
        """The rest, of what `attend_past` gives; lengths: of the memory."""
        keys, values = memory
        x = self._add(
            lambda y, norm, residual: self.encoder_attn(
                y, keys, values, lengths=lengths, norm=norm, residual=residual
            ),
            self.encoder_attn_layer_norm,
            x,
        )
        return self._feed_forward(x)

    def memory_weights(self, x: Tensor, keys: Tensor, heads: Sequence[int]) -> Tensor:
        """How much each token attends to each place of the memory, after `attend_past`.

        Args:
            x: what `attend_past` gives; keys: of the memory; heads: which.

        Returns:
            f32 [batch, len(heads), seq_len, kv_len].
        """
        y = self.encoder_attn_layer_norm(x) if self.norm_first else x
        return self.encoder_attn.weights(y, keys, heads)


class ConvFrontend(Module):
    """Two convolutions with GELU, the second of stride 2, and a table of positions.

    Args:
        mels: channels of the spectrogram; width: of the states; positions: rows of the table.
    """

    embed_positions: Tensor

    def __init__(self, mels: int, width: int, positions: int) -> None:
        self.conv1: Conv1d = Conv1d(mels, width, 3, padding=1)
        self.conv2: Conv1d = Conv1d(width, width, 3, stride=2, padding=1)
        self.embed_positions = parameter(positions, width)

    def sources(self, path: str, name: str, shape: Shape) -> tuple[tuple[str, Shape], ...]:
        """The table is a layer of the checkpoint."""
        return ((f"{path}{name}.weight", shape),)

    def forward(self, mel: Tensor) -> Tensor:
        """[batch, mels, frames] to [batch, (frames + 1) // 2, width].

        Raises:
            ShapeError: for more frames than there are positions, two to each.
        """
        most = 2 * self.embed_positions.shape[0]
        if mel.ndim == 3 and mel.shape[2] > most:
            raise ShapeError(f"ConvFrontend: expected up to {most} frames, got {list(mel.shape)}")
        y = self.conv2(self.conv1(mel, "gelu"), "gelu").permute(0, 2, 1)
        return y + self.embed_positions[: y.shape[1]].astype(y.dtype)
