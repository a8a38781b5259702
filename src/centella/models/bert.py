"""BERT: a bidirectional transformer encoder.

Source: Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers". Attributes
carry the names that transformers gives the tensors of a checkpoint.
"""

from __future__ import annotations

from typing import Any, ClassVar

from centella.dtypes import DType, f32
from centella.errors import ShapeError
from centella.models.config import ACTIVATIONS, ModelConfig
from centella.nn import Embedding, LayerNorm, Linear, Module
from centella.tensors.arguments import check_tensors
from centella.tensors.functional import attention
from centella.tensors.tensor import Tensor


class BertConfig(ModelConfig, frozen=True):
    """The numbers of a BERT."""

    supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": tuple(ACTIVATIONS),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
    }
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden_size", "num_attention_heads"),)
    layer_tensors: ClassVar[int] = 16

    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    position_embedding_type: str = "absolute"
    is_decoder: bool = False


class Embeddings(Module):
    """Word, token type (always 0: one segment) and position, added, then normalised."""

    def __init__(self, config: BertConfig, dtype: DType) -> None:
        width = config.hidden_size
        self.word_embeddings: Embedding = Embedding(config.vocab_size, width)
        self.token_type_embeddings: Embedding = Embedding(config.type_vocab_size, width)
        self.position_embeddings: Embedding = Embedding(config.max_position_embeddings, width)
        self.LayerNorm: LayerNorm = LayerNorm(width, config.layer_norm_eps)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [batch, seq_len] to [batch, seq_len, hidden]."""
        words = self.word_embeddings(ids).astype(self.dtype)
        positions = self.position_embeddings.weight[: ids.shape[1]]
        return self.LayerNorm(words + self.token_type_embeddings.weight[0] + positions)


class SelfAttention(Module):
    """softmax(q k^T / sqrt(head_dim)) v for each head; q, k, v come from one product."""

    def __init__(self, config: BertConfig) -> None:
        width = config.hidden_size
        stacks = {"query": width, "key": width, "value": width}
        self.qkv: Linear = Linear(width, 3 * width, stacks=stacks)
        self.num_heads: int = config.num_attention_heads
        self.head_dim: int = width // config.num_attention_heads

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same."""
        batch, seq_len, width = x.shape
        qkv = self.qkv(x).reshape(batch, seq_len, 3, self.num_heads, self.head_dim)
        qkv = qkv.permute(2, 0, 3, 1, 4)  # [3, batch, heads, seq_len, head_dim]: views
        y = attention(qkv[0], qkv[1], qkv[2], lengths=lengths)  # [batch, heads, seq_len, head_dim]
        return y.permute(0, 2, 1, 3).reshape(batch, seq_len, width)  # heads side by side


class Output(Module):
    """A product, the residual added to it, then normalised."""

    def __init__(self, in_features: int, config: BertConfig) -> None:
        self.dense: Linear = Linear(in_features, config.hidden_size)
        self.LayerNorm: LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[batch, seq_len, in_features] to [batch, seq_len, hidden]."""
        return self.LayerNorm(self.dense(x, residual=residual))


class Attention(Module):
    """Self-attention and its output."""

    def __init__(self, config: BertConfig) -> None:
        self.self: SelfAttention = SelfAttention(config)
        self.output: Output = Output(config.hidden_size, config)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same."""
        return self.output(self.self(x, lengths), residual=x)


class Intermediate(Module):
    """The widening half of the feed-forward network."""

    def __init__(self, config: BertConfig) -> None:
        self.dense: Linear = Linear(config.hidden_size, config.intermediate_size)
        self.activation: str = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to [batch, seq_len, intermediate]."""
        return self.dense(x, activation=self.activation)


class Layer(Module):
    """Attention, then the feed-forward network; each is normalised after its residual."""

    def __init__(self, config: BertConfig) -> None:
        self.attention: Attention = Attention(config)
        self.intermediate: Intermediate = Intermediate(config)
        self.output: Output = Output(config.intermediate_size, config)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same."""
        x = self.attention(x, lengths)
        return self.output(self.intermediate(x), residual=x)


class Encoder(Module):
    """The layers, in order."""

    def __init__(self, config: BertConfig) -> None:
        self.layer: list[Layer] = [Layer(config) for _ in range(config.num_hidden_layers)]

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """[batch, seq_len, hidden] to the same."""
        for layer in self.layer:
            x = layer(x, lengths)
        return x


class BertModel(Module):
    """The encoder: token ids to a state for each token.

    Args:
        config: the numbers.
        dtype: of the activations. Weights may be stored in another; a product reads them as they
            are, other ops convert them first.
    """

    # heads, and a range of integers
    ignored: tuple[str, ...] = ("pooler.*", "cls.*", "embeddings.position_ids")

    def __init__(self, config: BertConfig, dtype: DType = f32) -> None:
        self.config = config
        self.embeddings: Embeddings = Embeddings(config, dtype)
        self.encoder: Encoder = Encoder(config)

    def rename(self, name: str) -> str:
        """Drops the "bert." of checkpoints with a head; gamma and beta are the oldest ones'."""
        name = name.removeprefix("bert.")
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        return name.replace("LayerNorm.beta", "LayerNorm.bias")

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """The last hidden states.

        Args:
            ids: [batch, seq_len] i32, padded at the end.
            lengths: [batch] i32, tokens of each text; the states of padding mean nothing.

        Returns:
            [batch, seq_len, hidden].

        Raises:
            ShapeError: for ids of another rank, or longer than the position table.
            DTypeError: for what is no tensor, or not i32.
        """
        check_tensors("BertModel", ids, lengths)
        longest = self.config.max_position_embeddings
        if ids.ndim != 2 or ids.shape[1] > longest:
            raise ShapeError(
                f"BertModel: expected ids [batch, up to {longest}], got {list(ids.shape)}"
            )
        return self.encoder(self.embeddings(ids), lengths)
