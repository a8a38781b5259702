"""BERT-like encoders: from BERT and RoBERTa to Nomic, GTE and ModernBERT.

Source: Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers"; what each
family changes is a switch of `BertConfig`. Attributes carry the names that transformers gives the
tensors of a BERT.

    x = norm(words + token type + position)
    for each layer:  x = norm(x + out(attention(x)))
                     x = norm(x + narrow(act(widen(x))))     or act(gate(x)) * up(x)
    in ModernBERT:   x = x + out(attention(norm(x))),  x = x + narrow(...(norm(x))),  norm(x)
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from centella.dtypes import Array, DType, f32
from centella.errors import ShapeError
from centella.models.bert_config import BertConfig
from centella.models.config import ACTIVATIONS
from centella.nn import Embedding, LayerNorm, Linear, Module
from centella.nn.attention import join_heads, split_heads
from centella.runtime.device import Device
from centella.tensors.arguments import check_tensors
from centella.tensors.creation import asarray
from centella.tensors.functional import attention, embedding, normed_linear, rope
from centella.tensors.tensor import Tensor

__all__ = ["BertConfig", "BertModel"]

Tables = tuple[Tensor, Tensor]  # cos and sin, f32 [seq_len, head_dim / 2]
MOST_DISTANCE = 128  # from which on all distances share a bias


class Scene(Struct, frozen=True, eq=False):
    """What attention of one layer sees beside its input.

    Attributes:
        lengths: [batch] i32, tokens of each text.
        offsets: [texts + 1] i32 in place of lengths: texts lie end to end, each begins at its own.
        positions: [1, tokens] i32, of each token in its text, where they lie so.
        bias: added to scores by the distance of key and query, [heads, n]; None: none.
        tables: of the rotary embedding; None: none.
        window: keys on either side that a query sees; -1: all.
    """

    lengths: Tensor | None
    offsets: Tensor | None = None
    positions: Tensor | None = None
    bias: Tensor | None = None
    tables: Tables | None = None
    window: int = -1


class Embeddings(Module):
    """Words, token types and positions, added, then normalised; a product may widen them."""

    def __init__(self, config: BertConfig, dtype: DType) -> None:
        c, width = config, config.embedding_size or config.hidden_size
        self.word_embeddings: Embedding = Embedding(c.vocab_size, width)
        self.token_type_embeddings: Embedding | None = None
        if c.type_vocab_size:
            self.token_type_embeddings = Embedding(c.type_vocab_size, width)
        self.position_embeddings: Embedding | None = None
        if not c.traits.rotary:
            self.position_embeddings = Embedding(c.max_position_embeddings, width)
        self.LayerNorm: LayerNorm = LayerNorm(width, c.layer_norm_eps, c.norm_bias)
        self.project: Linear | None = (
            None if width == c.hidden_size else Linear(width, c.hidden_size)
        )
        self.offset: int = c.position_offset
        self.dtype = dtype

    def forward(
        self, ids: Tensor, types: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Ids, token types (None: all 0) and positions (None: 0 on) to [batch, seq_len, hidden]."""
        x = self.word_embeddings(ids).astype(self.dtype)
        if self.token_type_embeddings is not None:
            table = self.token_type_embeddings
            x = x + (table.weight[0] if types is None else table(types).astype(self.dtype))
        if self.position_embeddings is not None:
            rows, first = self.position_embeddings.weight, self.offset
            if positions is None:
                x = x + rows[first : first + ids.shape[1]]
            else:
                x = x + embedding(positions, rows[first:]).astype(self.dtype)
        x = self.LayerNorm(x)
        return x if self.project is None else self.project(x)


class SelfAttention(Module):
    """softmax(q k^T / sqrt(head_dim) + bias) v for each head; q, k, v come from one product."""

    def __init__(self, config: BertConfig) -> None:
        width = config.hidden_size
        stacks = {} if config.traits.packed else {"query": width, "key": width, "value": width}
        self.qkv: Linear = Linear(width, 3 * width, config.attention_bias, stacks=stacks)
        self.num_heads: int = config.num_attention_heads
        self.head_dim: int = width // config.num_attention_heads

    def forward(self, x: Tensor, scene: Scene) -> Tensor:
        """[batch, seq_len, hidden] to the same."""
        heads = self.num_heads
        qkv = split_heads(self.qkv(x), 3 * heads)  # [batch, 3 heads, seq_len, head_dim]: views
        qk, v = qkv[:, : 2 * heads], qkv[:, 2 * heads :]
        if scene.tables is not None:
            qk = rope(qk, *scene.tables, scene.positions)
        window = None if scene.window < 0 else scene.window + 1
        y = attention(qk[:, :heads], qk[:, heads:], v, lengths=scene.lengths,
                      offsets=scene.offsets, bias=scene.bias, window=window)  # fmt: skip
        return join_heads(y)


class Output(Module):
    """A product, the residual added to it, then normalised, unless parts normalise their input."""

    def __init__(self, in_features: int, bias: bool, config: BertConfig) -> None:
        self.dense: Linear = Linear(in_features, config.hidden_size, bias)
        self.norm_last: bool = not config.traits.norm_first
        if self.norm_last:
            self.LayerNorm: LayerNorm = norm_of(config)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[batch, seq_len, in_features] to [batch, seq_len, hidden]."""
        y = self.dense(x, residual=residual)
        return self.LayerNorm(y) if self.norm_last else y


class Attention(Module):
    """Self-attention and its output; `norm`: of the input, where there is one."""

    def __init__(self, config: BertConfig, first: bool) -> None:
        norm_first = config.traits.norm_first and not first  # embeddings are normalised already
        self.norm: LayerNorm | None = norm_of(config) if norm_first else None
        self.self: SelfAttention = SelfAttention(config)
        self.output: Output = Output(config.hidden_size, config.attention_bias, config)

    def forward(self, x: Tensor, scene: Scene) -> Tensor:
        """[batch, seq_len, hidden] to the same."""
        y = x if self.norm is None else self.norm(x)
        return self.output(self.self(y, scene), residual=x)


class Wide(Linear):
    """Gate and up as one product, gate first; a checkpoint may have up first."""

    def __init__(self, config: BertConfig) -> None:
        inner, kind = config.intermediate_size, config.traits.gated
        stacks = {"gate": inner, "up": inner} if kind == "apart" else {}
        super().__init__(config.hidden_size, 2 * inner, config.inner_bias, stacks=stacks)
        self.swapped: bool = kind == "up first"

    def arranged(self, name: str, data: Array) -> Array:
        """Rows of the gate, then those of up."""
        return np.roll(data, len(data) // 2, 0) if self.swapped else data


class Intermediate(Module):
    """The widening half of the feed-forward network, perhaps gated (Shazeer 2020)."""

    def __init__(self, config: BertConfig) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        self.norm: LayerNorm | None = norm_of(config) if config.traits.norm_first else None
        self.gated: bool = bool(config.traits.gated)
        self.dense: Linear = Wide(config) if self.gated else Linear(width, inner, config.inner_bias)
        self.activation: str = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to [batch, seq_len, intermediate]."""
        x = x if self.norm is None else self.norm(x)
        if not self.gated:
            return self.dense(x, activation=self.activation)
        return normed_linear(x, self.dense.weight, gate=self.activation, bias=self.dense.bias)


class Layer(Module):
    """Attention, then the feed-forward network."""

    def __init__(self, config: BertConfig, first: bool) -> None:
        self.attention: Attention = Attention(config, first)
        self.intermediate: Intermediate = Intermediate(config)
        self.output: Output = Output(config.intermediate_size, config.mlp_bias, config)

    def forward(self, x: Tensor, scene: Scene | Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same; of lengths alone without bias and rotation."""
        x = self.attention(x, scene if isinstance(scene, Scene) else Scene(scene))
        return self.output(self.intermediate(x), residual=x)


class Encoder(Module):
    """The layers, in order; layers may share their weights."""

    def __init__(self, config: BertConfig) -> None:
        c = config
        stored = c.num_hidden_groups * c.inner_group_num or c.num_hidden_layers
        self.layer: list[Layer] = [Layer(config, i == 0) for i in range(stored)]
        self.norm: LayerNorm | None = norm_of(config) if c.traits.norm_first else None
        self.relative_attention_bias: Embedding | None = None
        if c.relative_attention_num_buckets:
            self.relative_attention_bias = Embedding(
                c.relative_attention_num_buckets, c.num_attention_heads
            )
        self.config = config

    def forward(self, x: Tensor, scene: Scene) -> Tensor:
        """[batch, seq_len, hidden] to the same; the scene has the texts alone."""
        c, scenes = self.config, self.scenes(x.shape[1], x.device, scene)
        if not c.num_hidden_groups:
            for layer, scene in zip(self.layer, scenes, strict=False):  # fewer, where one is cut
                x = layer(x, scene)
        else:
            for i in c.order:
                x = self.layer[i](x, scenes[0])
        return x if self.norm is None else self.norm(x)

    def scenes(self, seq_len: int, device: Device, scene: Scene) -> list[Scene]:
        """Of each layer, what its attention sees."""
        c, layers = self.config, self.config.num_hidden_layers
        if self.relative_attention_bias is not None:
            return [replace(scene, bias=self.bias(self.relative_attention_bias))] * layers
        if not c.ropes:
            return [scene] * layers
        tables = self.tables(min(seq_len, c.positions), device)
        return [
            replace(scene, tables=tables[turn], window=window)
            for window, turn in zip(c.windows, c.rope_of, strict=True)
        ]

    def bias(self, table: Embedding) -> Tensor:
        """What is added to scores, by key - query: [heads, n], as `ct.attention` takes it."""
        ids = asarray(_buckets(table.weight.shape[0]), device=table.weight.device)
        return table(ids).astype(f32).T.contiguous()  # once for all layers

    def tables(self, seq_len: int, device: Device) -> list[Tables]:
        """Cos and sin of each rotary embedding; a capture keeps them."""
        tables = [turn.tables(seq_len) for turn in self.config.ropes]
        return [(asarray(cos, device=device), asarray(sin, device=device)) for cos, sin in tables]


def norm_of(config: BertConfig) -> LayerNorm:
    """A norm of hidden states."""
    return LayerNorm(config.hidden_size, config.layer_norm_eps, config.norm_bias)


def _buckets(buckets: int) -> Array:
    """The bias of each distance of key and query, i32 [2 * MOST_DISTANCE + 1].

    Source: Raffel et al. 2019, "Exploring the Limits of Transfer Learning": half of the buckets for
    each direction; of each half, one bucket a distance up to a half, then logarithmic.
    """
    half = buckets // 2
    exact = half // 2
    away = np.arange(-MOST_DISTANCE, MOST_DISTANCE + 1)  # key - query
    distance = np.abs(away)
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    far = exact + (ratio / np.float32(np.log(MOST_DISTANCE / exact)) * (half - exact)).astype(int)
    near = np.where(distance < exact, distance, np.minimum(far, half - 1))
    ids: Array = (near + half * (away > 0)).astype(np.int32)
    return ids


class BertModel(Module):
    """The encoder: token ids to a state for each token.

    Args:
        config: the numbers.
        dtype: of the activations. Weights may be stored in another; a product reads them as they
            are, other ops convert them first.
    """

    # heads, and ranges of integers
    ignored: tuple[str, ...] = (
        "pooler.*", "pooler_*", "cls.*", "lm_head.*", "predictions.*", "vocab_*", "head.*",
        "decoder.*", "classifier.*", "pre_classifier.*", "qa_outputs.*",
        "discriminator_predictions.*", "generator_*", "sop_classifier.*",
        "embeddings.position_ids", "embeddings.token_type_ids", "*rotary_emb.inv_freq",
    )  # fmt: skip

    def __init__(self, config: BertConfig, dtype: DType = f32) -> None:
        self.config = config
        self.embeddings: Embeddings = Embeddings(config, dtype)
        self.encoder: Encoder = Encoder(config)

    def rename(self, name: str) -> str:
        """The name that a BERT without a head has for a family's tensor."""
        name = self.config.traits.bare(name)
        if any(fnmatchcase(name, pattern) for pattern in self.ignored):
            return name
        for theirs, ours in self.config.traits.tensors:
            name = name.replace(theirs, ours)
        if self.config.model_type in ("nomic_bert", "modernbert"):
            name = re.sub(r"^(encoder\.)?layers\.", "encoder.layer.", name)
        inner = self.config.inner_group_num
        return re.sub(
            r"albert_layer_groups\.(\d{1,6})\.albert_layers\.(\d{1,6})\.",
            lambda m: f"layer.{int(m[1]) * inner + int(m[2])}.", name,
        )  # fmt: skip

    def forward(self, ids: Tensor, lengths: Tensor, types: Tensor | None = None) -> Tensor:
        """The last hidden states.

        Args:
            ids: [batch, seq_len] i32, padded at the end.
            lengths: [batch] i32, tokens of each text; the states of padding mean nothing.
            types: [batch, seq_len] i32, the part of a pair that each token is of; None: all 0.

        Returns:
            [batch, seq_len, hidden].

        Raises:
            ShapeError: for ids of another rank, or longer than the model has positions.
            DTypeError: for what is no tensor, or not i32.
        """
        check_tensors("BertModel", ids, lengths)
        longest = self.config.positions
        if ids.ndim != 2 or ids.shape[1] > longest:
            raise ShapeError(
                f"BertModel: expected ids [batch, up to {longest}], got {list(ids.shape)}"
            )
        return self.encoder(self.embeddings(ids, types), Scene(lengths))

    def end_to_end(
        self, ids: Tensor, offsets: Tensor, positions: Tensor, types: Tensor | None = None
    ) -> Tensor:
        """The last hidden states of texts that lie end to end, without padding between them.

        Args:
            ids: [tokens] i32; positions: [tokens] i32, of each token in its text.
            offsets: [texts + 1] i32, where each text begins, and where the last one ends; the
                states behind it mean nothing.
            types: [tokens] i32, the part of a pair that each token is of; None: all 0.

        Returns:
            [tokens, hidden].

        Raises:
            ShapeError: for shapes that do not fit these.
            DTypeError: for what is no tensor, or not i32.
        """
        check_tensors("BertModel", ids, offsets, positions)
        if ids.ndim != 1 or positions.shape != ids.shape:
            raise ShapeError(
                f"BertModel: expected ids and positions [tokens], got {list(ids.shape)} and "
                f"{list(positions.shape)}"
            )
        x = self.embeddings(ids[None], None if types is None else types[None], positions[None])
        return self.encoder(x, Scene(None, offsets, positions[None]))[0]
