"""Whisper: an encoder of sound and a decoder that writes what is said.

Source: Radford et al. 2022, "Robust Speech Recognition via Large-Scale Weak Supervision".
Attributes carry the names that transformers gives the tensors of a checkpoint.

    states = encoder(mel)                      sound, once a window
    memory = keys and values of the states, of each decoder layer
    logits = embed_tokens decoder(ids, memory)^T
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from centella.dtypes import DType, f32
from centella.errors import ShapeError
from centella.models.config import ACTIVATIONS, Fields, ModelConfig
from centella.nn import ConvFrontend, DecoderBlock, Embedding, EncoderBlock, LayerNorm, Module
from centella.nn.cache_layer import CacheLayer
from centella.nn.kv_cache import KVCache
from centella.nn.layers import Linear
from centella.nn.module import parameter
from centella.specs import Shape
from centella.tensors.arguments import check_tensors
from centella.tensors.creation import arange
from centella.tensors.functional import concat, gather, normed_linear
from centella.tensors.tensor import Tensor

# Fields that change nothing here: identity, training, other heads, and what generation_config.json
# says.
NEUTRAL = frozenset(
    """architectures model_type torch_dtype dtype transformers_version use_cache init_std dropout
    activation_dropout attention_dropout encoder_layerdrop decoder_layerdrop classifier_proj_size
    use_weighted_layer_sum apply_spec_augment mask_time_prob mask_time_length mask_time_min_masks
    mask_feature_prob mask_feature_length mask_feature_min_masks is_encoder_decoder bos_token_id
    eos_token_id pad_token_id decoder_start_token_id suppress_tokens begin_suppress_tokens
    forced_decoder_ids max_length num_hidden_layers _name_or_path return_dict output_attentions
    output_hidden_states _attn_implementation _attn_implementation_autoset tokenizer_class
    num_beams transformers.js_config lang_ids lang_to_id task_to_id""".split()
)
Memory = Sequence[Tensor | tuple[Tensor, Tensor]]  # keys and values of each decoder layer


class WhisperConfig(ModelConfig, frozen=True):
    """The numbers of a Whisper.

    Attributes:
        hidden_size: `d_model`; num_hidden_layers: of encoder and decoder.
        activation: between the products of a feed-forward network.
        median_filter_width: of the attention that words are timed by.
    """

    layer_tensors: ClassVar[int] = 15  # of the encoder's; the decoder's have more

    num_mel_bins: int
    encoder_layers: int
    decoder_layers: int
    encoder_attention_heads: int
    decoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_ffn_dim: int
    max_source_positions: int
    max_target_positions: int
    activation: str
    scale_embedding: bool
    tie_word_embeddings: bool
    median_filter_width: int

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], origin: str = "config.json") -> Self:
        """The config that a config.json holds.

        Raises:
            WeightsError: a value is missing or malformed, or a field is set that this library does
                not know: it names it.
        """
        fields = Fields({"tie_word_embeddings": True, **values}, origin, NEUTRAL)
        sizes = {
            name: fields.whole(name)
            for name in """vocab_size num_mel_bins encoder_layers decoder_layers
            encoder_attention_heads decoder_attention_heads encoder_ffn_dim decoder_ffn_dim
            max_source_positions max_target_positions""".split()
        }
        width, name = fields.whole("d_model"), fields.get("activation_function", "gelu")
        if not isinstance(name, str) or name not in ACTIVATIONS:
            fields.fail("activation_function", ", ".join(ACTIVATIONS), name)
        for heads in ("encoder_attention_heads", "decoder_attention_heads"):
            if width % sizes[heads]:
                fields.fail(heads, f"a divisor of {width} (d_model)", sizes[heads])
        median = fields.whole("median_filter_width", 7)
        if not median % 2:
            fields.fail("median_filter_width", "an odd number", median)
        config = cls(
            hidden_size=width, activation=ACTIVATIONS[name], median_filter_width=median,
            num_hidden_layers=sizes["encoder_layers"] + sizes["decoder_layers"],
            scale_embedding=fields.flag("scale_embedding"),
            tie_word_embeddings=fields.flag("tie_word_embeddings"), **sizes,
        )  # fmt: skip
        fields.expect_all_read()
        return config

    @property
    def frames(self) -> int:
        """Frames of a spectrogram in a window, 10 ms each."""
        return 2 * self.max_source_positions


class WhisperEncoder(Module):
    """A spectrogram to a state for each 20 ms."""

    def __init__(self, config: WhisperConfig, dtype: DType) -> None:
        c, width = config, config.hidden_size
        self.dtype = dtype
        self.frontend: ConvFrontend = ConvFrontend(c.num_mel_bins, width, c.max_source_positions)
        self.layers: list[EncoderBlock] = [
            EncoderBlock(
                width, c.encoder_attention_heads, c.encoder_ffn_dim, activation=c.activation,
                unbiased=("k_proj",),
            )
            for _ in range(c.encoder_layers)
        ]  # fmt: skip
        self.layer_norm: LayerNorm = LayerNorm(width)

    def forward(self, mel: Tensor) -> Tensor:
        """[batch, mels, frames] to [batch, (frames + 1) // 2, width]."""
        x = self.frontend(mel.astype(self.dtype))
        for layer in self.layers:
            x = layer(x)
        return self.layer_norm(x)


class WhisperDecoder(Module):
    """Token ids to states, each attending to the tokens before it and to the sound."""

    embed_positions: Tensor

    def __init__(self, config: WhisperConfig, dtype: DType) -> None:
        c, width = config, config.hidden_size
        self.dtype = dtype
        self.scale: float = math.sqrt(width) if c.scale_embedding else 1.0
        self.embed_tokens: Embedding = Embedding(c.vocab_size, width)
        self.embed_positions = parameter(c.max_target_positions, width)
        self.layers: list[DecoderBlock] = [
            DecoderBlock(
                width, c.decoder_attention_heads, c.decoder_ffn_dim, activation=c.activation,
                unbiased=("k_proj",),
            )
            for _ in range(c.decoder_layers)
        ]  # fmt: skip
        self.layer_norm: LayerNorm = LayerNorm(width)

    def sources(self, path: str, name: str, shape: Shape) -> tuple[tuple[str, Shape], ...]:
        """The table is a layer of the checkpoint."""
        return ((f"{path}{name}.weight", shape),)

    def forward(
        self, ids: Tensor, memory: Memory, cache: KVCache | None = None,
        at: Tensor | None = None, mask: Tensor | None = None,
        memory_lengths: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[batch, tokens] i32 to [batch, tokens, width], before the last norm.

        Args:
            cache: of the tokens before these; without it these are all.
            at: [batch, tokens] i32, their positions, where they do not go on from the cache's.
            mask: which keys of the cache each token sees, as `ct.attention` takes it.
            memory_lengths: [batch] i32, places of the sound that count.
        """
        x = self.embedded(ids, cache, at)
        for i, (layer, pair) in enumerate(zip(self.layers, memory, strict=True)):
            x = layer(x, pair, cache=cache, layer=i, mask=mask, memory_lengths=memory_lengths)
        return x

    def embedded(
        self, ids: Tensor, cache: KVCache | None = None, at: Tensor | None = None
    ) -> Tensor:
        """Tokens and their positions, which go on from those of the cache."""
        tokens = ids.shape[1]
        x = self.embed_tokens(ids).astype(self.dtype)
        x = x if self.scale == 1.0 else x * self.scale
        if at is None and cache is None:
            return x + self.embed_positions[:tokens].astype(self.dtype)
        if at is None and cache is not None:
            at = cache.begin(tokens).reshape(-1, 1)
            at = at if tokens == 1 else at + arange(tokens, device=ids.device)
        assert at is not None
        return x + gather(self.embed_positions, at).astype(self.dtype)

    def weights(self, ids: Tensor, memory: Memory, heads: Sequence[Sequence[int]]) -> Tensor:
        """How much each token attends to each place of the sound.

        Args:
            ids: [batch, tokens] i32, from the first on; heads: (layer, head) of each, by layer.

        Returns:
            f32 [batch, len(heads), tokens, places].
        """
        return concat(list(self._weights(ids, memory, heads)), 1)

    def _weights(
        self, ids: Tensor, memory: Memory, heads: Sequence[Sequence[int]]
    ) -> Iterator[Tensor]:
        x = self.embedded(ids)
        for i in range(1 + max(layer for layer, _ in heads)):
            block, some = self.layers[i], [head for layer, head in heads if layer == i]
            x = block.attend_past(x)
            if some:
                yield block.memory_weights(x, memory[i][0], some)
            x = block.attend_memory(x, memory[i])


class WhisperModel(Module):
    """Encoder and decoder: a spectrogram and token ids to logits.

    Args:
        config: the numbers.
        dtype: of the activations, keys and values.
    """

    def __init__(self, config: WhisperConfig, dtype: DType = f32) -> None:
        self.config = config
        self.dtype = dtype
        self.encoder: WhisperEncoder = WhisperEncoder(config, dtype)
        self.decoder: WhisperDecoder = WhisperDecoder(config, dtype)
        if config.tie_word_embeddings:
            self.ignored: tuple[str, ...] = ("proj_out.weight",)
        else:
            self.proj_out: Linear = Linear(config.hidden_size, config.vocab_size, bias=False)

    def rename(self, name: str) -> str:
        """Drops the "model." of checkpoints with a head; the frontend is a module here."""
        name = name.removeprefix("model.")
        for part in ("conv1.", "conv2.", "embed_positions."):
            name = name.replace(f"encoder.{part}", f"encoder.frontend.{part}")
        return name

    def forward(self, mel: Tensor, ids: Tensor) -> Tensor:
        """Logits f32 [batch, tokens, vocab].

        Args:
            mel: [batch, mels, frames], of `ct.log_mel`.
            ids: [batch, tokens] i32, all from the first on.

        Raises:
            ShapeError, DTypeError: for what does not fit these, or more tokens than positions.
        """
        check_tensors(type(self).__name__, mel, ids)
        most = self.config.max_target_positions
        if ids.ndim != 2 or not 0 < ids.shape[1] <= most or ids.shape[0] != mel.shape[0]:
            raise ShapeError(
                f"{type(self).__name__}: expected ids [{mel.shape[0]}, up to {most}], got "
                f"{list(ids.shape)}"
            )
        return self.head(self.decoder(ids, self.memory(self.encode(mel))))

    def encode(self, mel: Tensor) -> Tensor:
        """The encoder's states [batch, places, width] of [batch, mels, frames].

        Raises:
            ShapeError: another number of mels, or more frames than positions, two to each.
        """
        check_tensors("encode", mel)
        mels, frames = self.config.num_mel_bins, self.config.frames
        if mel.ndim != 3 or mel.shape[1] != mels or not 0 < mel.shape[2] <= frames:
            raise ShapeError(
                f"encode: expected a spectrogram [batch, {mels}, up to {frames}], got "
                f"{list(mel.shape)}"
            )
        return self.encoder(mel)

    def memory(self, states: Tensor) -> list[Tensor]:
        """Keys and values of the encoder's states for each decoder layer.

        Each [2, batch, heads, places, head_dim].
        """
        return [layer.encoder_attn.keys_values(states) for layer in self.decoder.layers]

    def head(self, x: Tensor) -> Tensor:
        """What the decoder gives to logits, f32."""
        tied, norm = self.config.tie_word_embeddings, self.decoder.layer_norm
        weight = self.decoder.embed_tokens.weight if tied else self.proj_out.weight
        return normed_linear(
            x, weight, norm.weight, kind="layer", shift=norm.bias, eps=norm.eps, dtype=f32
        )

    def empty_memory(self, batch: int) -> list[CacheLayer]:
        """Room for the `memory` of `batch` windows in each decoder layer, zeros at first.

        Keys and values [1, heads, batch * places, head_dim]: windows lie behind one another, so a
        window is written from its first place on, as tokens are written to a cache.
        """
        c = self.config
        heads = c.decoder_attention_heads
        shape = (1, heads, batch * c.max_source_positions, c.hidden_size // heads)
        layers = [
            CacheLayer(shape, self.dtype, self.device, "memory of the sound,", i)
            for i in range(c.decoder_layers)
        ]
        for layer in layers:
            layer.reset()
        return layers
