"""Llama-like decoders: Llama, Mistral, Qwen2, Qwen3, Phi-3, SmolLM3, Granite, OLMo 2, Gemma 2, 3.

Qwen3-MoE is one of them, with a mixture of experts (`models/moe.py`) for the gated network.

Source: Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models"; what each
family changes is a switch of `LlamaConfig`. Attributes carry the names of checkpoint tensors.

    x = m embed(ids)
    for each layer:  x = x + r out(attention(norm(x)))
                     y = norm(x);  x = x + r down(act(gate(y)) up(y))
    logits = cap(head(norm(x)) / d)
"""

from __future__ import annotations

from collections.abc import Iterator

from centella.dtypes import DType, f32
from centella.errors import ShapeError
from centella.models.llama_config import LlamaConfig
from centella.models.moe import SparseMLP
from centella.models.norm import HeadNorms, Norm
from centella.nn import Embedding, Linear, Module
from centella.nn.attention import join_heads
from centella.nn.kv_cache import KVCache
from centella.nn.past import Cache, Past, Tables
from centella.runtime.device import Device
from centella.runtime.device import device as open_device
from centella.tensors.arguments import check_tensors
from centella.tensors.creation import asarray, full
from centella.tensors.functional import (
    concat,
    embedding,
    linear,
    normed_linear,
    tanh,
)
from centella.tensors.tensor import Tensor


class Attention(Module):
    """Causal attention with grouped heads, rotary embedding and a cache."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        c = config
        self.config: LlamaConfig = config
        self.layer: int = layer
        heads, kv, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        stacks = {"q_proj": heads * d, "k_proj": kv * d, "v_proj": kv * d}
        rows = sum(stacks.values())
        stacks = {"qkv_proj": rows} if c.traits.fused else stacks
        self.qkv: Linear = Linear(c.hidden_size, rows, c.qkv_bias, stacks=stacks)
        self.o_proj: Linear = Linear(heads * d, c.hidden_size, c.out_bias)
        self.norms: HeadNorms | None = None
        if c.traits.qk_norm == "head":
            self.norms = HeadNorms(d, c.traits.offset)
        elif c.traits.qk_norm == "whole":
            self.q_norm: Norm = Norm(heads * d, c.rms_norm_eps, c.traits.offset)
            self.k_norm: Norm = Norm(kv * d, c.rms_norm_eps, c.traits.offset)

    def forward(self, x: Tensor, norm: Norm | None, past: Past[Cache]) -> Tensor:
        """[batch, tokens, hidden] to [batch, tokens, heads * head_dim]; appends to the past."""
        c, cache = self.config, past.cache
        weight = None if norm is None else norm.scale
        qkv = normed_linear(x, self.qkv.weight, weight, eps=c.rms_norm_eps, bias=self.qkv.bias)
        if c.traits.qk_norm == "whole":
            q, k = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
            parts = [self.q_norm(qkv[..., :q]), self.k_norm(qkv[..., q : q + k]), qkv[..., q + k :]]
            qkv = concat(parts, -1)
        turn = c.rope_of[self.layer]
        cos, sin = past.still if turn < 0 else past.tables[turn]
        norms = None if self.norms is None else self.norms.weight
        y = cache.attend_qkv(
            qkv, cos, sin, self.layer, qk_norm=norms, eps=c.rms_norm_eps, scale=c.attention_scale,
            window=c.windows[self.layer] or None, softcap=c.attention_softcap or None,
        )  # [batch, heads, tokens, head_dim]  # fmt: skip
        return join_heads(y)


class MLP(Module):
    """down(act(gate(x)) * up(x)), gate and up in one product (Shazeer 2020)."""

    def __init__(self, config: LlamaConfig) -> None:
        c, inner = config, config.intermediate_size
        stacks = {"gate_up_proj": 2 * inner} if c.traits.fused else {"gate_proj": inner,
                                                                     "up_proj": inner}  # fmt: skip
        self.eps: float = c.rms_norm_eps
        self.activation: str = c.activation
        self.residual_multiplier: float = c.residual_multiplier
        self.gate_up: Linear = Linear(c.hidden_size, 2 * inner, c.mlp_bias, stacks=stacks)
        self.down_proj: Linear = Linear(inner, c.hidden_size, c.mlp_bias)

    def forward(self, x: Tensor, norm: Norm | None, residual: Tensor | None = None) -> Tensor:
        """[batch, tokens, hidden] to the same; a residual is added to it."""
        y = normed_linear(
            x, self.gate_up.weight, None if norm is None else norm.scale, eps=self.eps,
            gate=self.activation, bias=self.gate_up.bias,
        )  # [batch, tokens, intermediate]  # fmt: skip
        if residual is None:
            return self.down_proj(y)
        return _added(residual, y, self.down_proj, self.residual_multiplier)


def _added(x: Tensor, y: Tensor, product: Linear, r: float) -> Tensor:
    """x + r product(y), in one launch where the product has no bias."""
    if r == 1.0:
        return product(y, residual=x)
    if product.bias is None:
        return linear(y, product.weight, alpha=r, residual=x)
    return x + product(y) * r


class Layer(Module):
    """Attention, then the gated network, each with its norms and its residual."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        self.config = config
        self.kind: str = config.traits.norms
        self.self_attn: Attention = Attention(config, layer)
        self.mlp: MLP | SparseMLP = SparseMLP(config) if config.sparse[layer] else MLP(config)

        def norm() -> Norm:
            return Norm(config.hidden_size, config.rms_norm_eps, config.traits.offset)

        self.post_attention_layernorm: Norm = norm()
        if config.traits.norms != "post":
            self.input_layernorm: Norm = norm()
        if config.traits.norms != "pre":
            self.post_feedforward_layernorm: Norm = norm()
        if config.traits.norms == "both":
            self.pre_feedforward_layernorm: Norm = norm()

    def forward(self, x: Tensor, past: Past[Cache]) -> Tensor:
        """[batch, tokens, hidden] to the same."""
        attention, mlp = self.self_attn, self.mlp
        if self.kind == "pre":
            y = attention(x, self.input_layernorm, past)
            x = _added(x, y, attention.o_proj, self.config.residual_multiplier)
            return mlp(x, self.post_attention_layernorm, x)
        y = attention(x, self.input_layernorm if self.kind == "both" else None, past)
        x = x + self.post_attention_layernorm(attention.o_proj(y))
        y = mlp(x, self.pre_feedforward_layernorm if self.kind == "both" else None)
        return x + self.post_feedforward_layernorm(y)


class LlamaModel(Module):
    """The decoder: token ids to logits.

    Args:
        config: the numbers.
        dtype: of the activations and of keys and values.
    """

    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)

    def __init__(self, config: LlamaConfig, dtype: DType = f32) -> None:
        self.config = config
        self.dtype = dtype
        self.embed_tokens: Embedding = Embedding(config.vocab_size, config.hidden_size)
        self.layers: list[Layer] = [Layer(config, i) for i in range(config.num_hidden_layers)]
        self.norm: Norm = Norm(config.hidden_size, config.rms_norm_eps, config.traits.offset)
        if config.tie_word_embeddings:
            self.ignored = (*self.ignored, "lm_head.weight")
        else:
            self.lm_head: Linear = Linear(config.hidden_size, config.vocab_size, bias=False)

    def rename(self, name: str) -> str:
        """Drops the "model." of checkpoints with a head."""
        return name.removeprefix("model.")

    def past(
        self, batch: int, capacity: int, device: str | Device | None = None, *,
        dtype: DType | None = None,
    ) -> Past[KVCache]:  # fmt: skip
        """An empty past for `batch` sequences of up to `capacity` tokens.

        Where rotary frequencies depend on the length of a text, they are those of `capacity`.

        Args:
            device: where it is; default: the model's.
            dtype: storage of keys and values: that of activations, or i8.

        Raises:
            ShapeError: a capacity above `max_position_embeddings`.
        """
        c, where_to = self.config, self.device if device is None else open_device(device)
        most = c.max_position_embeddings
        if capacity > most:
            raise ShapeError(
                f"{type(self).__name__}: expected a capacity of up to {most:,} tokens "
                f"(max_position_embeddings), got {capacity:,}{c.limit}"
            )
        cache = KVCache(
            batch, c.num_key_value_heads, c.head_dim, capacity, num_layers=c.num_hidden_layers,
            dtype=dtype or self.dtype, device=where_to,
        )  # fmt: skip
        return Past(cache, *self.rotary(capacity, where_to))

    def rotary(
        self, capacity: int, device: Device, length: int | None = None
    ) -> tuple[tuple[Tables, ...], Tables]:
        """What a `Past` of that capacity has beside its cache: tables that turn, and still ones.

        Args:
            length: tokens of the text, as for `Rope.tables`.
        """
        tables = [tuple(asarray(t, device=device) for t in r.tables(capacity, length))
                  for r in self.config.ropes]  # fmt: skip
        ones = full((capacity, 1), 1.0, device=device)
        return tuple((cos, sin) for cos, sin in tables), (ones, ones * 0.0)

    def forward(self, ids: Tensor, past: Past[Cache] | None = None, last: bool = False) -> Tensor:
        """Logits f32 [batch, tokens, vocab]; [batch, 1, vocab] of the last token with `last`.

        Args:
            ids: [batch, tokens] i32, which follow those of the past. One that is not in the
                vocabulary makes all logits of its sequence NaN.
            past: what `past()` gave; the tokens' keys and values are appended to it. None: these
                are all the tokens.

        Raises:
            ShapeError: ids of another rank, or not of as many sequences as the past.
            DTypeError: not i32; KVCacheFullError: there is no room in the past.
        """
        check_tensors(type(self).__name__, ids)
        if ids.ndim != 2:
            raise ShapeError(
                f"{type(self).__name__}: expected ids [batch, tokens], got {list(ids.shape)}"
            )
        x = self.states(ids, past or self.past(ids.shape[0], ids.shape[1], ids.device))
        return self.head(x[:, -1:] if last else x)

    def states(self, ids: Tensor, past: Past[Cache]) -> Tensor:
        """Ids [batch, tokens] to the states of the last layer [batch, tokens, hidden]."""
        *_, last = self.layer_states(ids, past)
        return last

    def layer_states(self, ids: Tensor, past: Past[Cache]) -> Iterator[Tensor]:
        """The embeddings, then the states of each layer, all [batch, tokens, hidden]."""
        c = self.config
        x = embedding(ids, self.embed_tokens.weight).astype(self.dtype)
        if c.embedding_multiplier != 1.0:
            x = x * c.embedding_multiplier
        yield x
        for layer in self.layers:
            x = layer(x, past)
            yield x

    def head(self, x: Tensor) -> Tensor:
        """States of the last layer to logits, f32."""
        c = self.config
        weight = self.embed_tokens.weight if c.tie_word_embeddings else self.lm_head.weight
        logits = normed_linear(
            x, weight, self.norm.scale, eps=c.rms_norm_eps, alpha=1.0 / c.logits_divisor,
            dtype=f32,
        )  # fmt: skip
        if c.logits_softcap:
            logits = tanh(logits / c.logits_softcap) * c.logits_softcap
        return logits
