"""The config.json of Llama-like decoders: what the families share, and where each differs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from msgspec import Struct

from centella.models.config import ACTIVATIONS, Fields, ModelConfig
from centella.models.rope import Rope
from centella.ops import topk
from centella.weights.model_files import known, show


class Traits(Struct, frozen=True):
    """What a family has that its config.json does not state.

    Attributes:
        qkv_bias, out_bias: None where `attention_bias` says it.
        qk_norm: RMS norm of q and k: "" none, "head" of each head, "whole" of all heads together.
        norms: of a sub-layer: "pre" its input, "post" its result, "both".
        offset: what is added to a norm's stored weight.
        scaled_embedding: whether embeddings are multiplied by sqrt(hidden_size).
        fused: whether q, k, v are one tensor of the checkpoint, and gate and up another.
        windows: layers with a sliding window where `layer_types` is missing: "" none, "all",
            "even"; under `use_sliding_window` "used" (all), "later" (from `max_window_layers` on)
            or "unturned" (those without rotary embedding); or the period of the full layers ("6":
            every sixth).
        partial: whether `partial_rotary_factor` is read; heads of the others turn as a whole.
        experts: whether layers have a mixture of experts, but those that `mlp_only_layers` and
            `decoder_sparse_step` leave out.
        defaults: fields with another default than Llama's.
    """

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    qk_norm: str = ""
    norms: str = "pre"
    offset: float = 0.0
    scaled_embedding: bool = False
    fused: bool = False
    windows: str = ""
    partial: bool = False
    experts: bool = False
    defaults: Mapping[str, Any] = {}


GEMMA = {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
         "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256}  # fmt: skip
# By `model_type`.
FAMILIES: dict[str, Traits] = {
    "llama": Traits(),
    "mistral": Traits(windows="all"),
    "qwen2": Traits(qkv_bias=True, out_bias=False, windows="later"),
    "qwen3": Traits(qk_norm="head", windows="later", defaults={"head_dim": 128}),
    "qwen3_moe": Traits(qk_norm="head", windows="used", experts=True),
    "phi3": Traits(fused=True, windows="all", partial=True),
    "smollm3": Traits(windows="unturned",
                      defaults={"rope_theta": 2e6, "no_rope_layer_interval": 4,
                                "tie_word_embeddings": True}),
    "granite": Traits(),
    "olmo2": Traits(qk_norm="whole", norms="post", defaults={"rms_norm_eps": 1e-5}),
    "gemma2": Traits(norms="both", offset=1.0, scaled_embedding=True, windows="even",
                     defaults={**GEMMA, "attn_logit_softcapping": 50.0,
                               "final_logit_softcapping": 30.0, "sliding_window": 4096}),
    "gemma3_text": Traits(qk_norm="head", norms="both", offset=1.0, scaled_embedding=True,
                          windows="6", defaults={**GEMMA, "rope_theta": 1e6,
                                                 "rope_local_base_freq": 1e4,
                                                 "sliding_window": 4096}),
}  # fmt: skip
# Fields that change nothing here: identity, training, and what other libraries do.
NEUTRAL = frozenset(
    """architectures model_type torch_dtype dtype transformers_version use_cache initializer_range
    attention_dropout embd_pdrop resid_pdrop bos_token_id eos_token_id pad_token_id pretraining_tp
    max_window_layers use_sliding_window auto_map _name_or_path output_attentions
    output_hidden_states return_dict _sliding_window_pattern sliding_window_pattern
    rope_local_base_freq no_rope_layer_interval original_max_position_embeddings
    cache_implementation _attn_implementation _attn_implementation_autoset id2label label2id
    unsloth_fixed unsloth_version tokenizer_class max_length router_aux_loss_coef
    output_router_logits is_llama_config transformers.js_config""".split()
)
COLUMNS = "rope.dimension_count"  # of a head, that turn: GGUF files say it for every family
FULL, SLIDING = "full_attention", "sliding_attention"


class LlamaConfig(ModelConfig, frozen=True):
    """The numbers of a Llama-like decoder, the same names for every family.

    Attributes:
        model_type: the family, a key of `FAMILIES`.
        windows: of each layer the keys that a query sees, itself included; 0: all.
        ropes: rotary embeddings; rope_of: of each layer its index there, -1: none.
        attention_scale: of q k^T.
        attention_softcap, logits_softcap: c in c tanh(x / c); 0: none.
        embedding_multiplier, residual_multiplier: of embeddings, and of what a sub-layer adds.
        logits_divisor: of the logits, before their softcap.
        sparse: of each layer whether it has a mixture of experts.
        num_experts, num_experts_per_tok: experts of such a layer, and how many a token goes to.
        norm_topk_prob: whether their shares sum up to 1.
        moe_intermediate_size: of an expert.
    """

    layer_tensors: ClassVar[int] = 5

    model_type: str
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    windows: tuple[int, ...]
    ropes: tuple[Rope, ...]
    rope_of: tuple[int, ...]
    attention_scale: float
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    sparse: tuple[bool, ...] = ()
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False

    @property
    def qkv_width(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    @property
    def activations_per_token(self) -> int:
        """About how many numbers a layer needs of a token at a time, rather more than fewer."""
        inner = max(self.intermediate_size, self.num_experts_per_tok * self.moe_intermediate_size)
        of_experts = 2 * self.num_experts_per_tok * self.hidden_size
        return 3 * (self.hidden_size + inner) + of_experts

    @property
    def positions(self) -> int:
        """Tokens of the longest text."""
        return self.max_position_embeddings

    @property
    def traits(self) -> Traits:
        """What its family has."""
        return FAMILIES[self.model_type]

    @property
    def limit(self) -> str:
        """Why no text is longer, where transformers takes longer ones: the end of a message."""
        if all(rope.kind != "dynamic" for rope in self.ropes):
            return ""
        return (
            "; beyond it rope_type dynamic has other frequencies at each length, and those of the "
            "keys that are kept would depend on how the text came"
        )

    def reach(self, length: int) -> int:
        """Tokens of the longest text that turns by the same frequencies as one of `length`."""
        ends = {end for rope in self.ropes if (end := rope.reach) is not None}
        return min((end for end in ends if end >= length), default=self.max_position_embeddings)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], origin: str = "config.json") -> Self:
        """The config that a config.json holds.

        Raises:
            WeightsError: a value is missing or malformed, or a field is set that this library does
                not know: it names it.
        """
        family = values.get("model_type")
        traits = known(origin, "model_type", family, FAMILIES)
        return cls(**_Reader({**traits.defaults, **values}, traits, origin).config(str(family)))

    def sizes(self) -> dict[str, int]:
        """Whole numbers that no tensor's largest extent may be below."""
        return {n: s for n, s in super().sizes().items() if n != "max_position_embeddings"}


class _Reader(Fields):
    """Reads the fields of a family."""

    def __init__(self, values: Mapping[str, Any], traits: Traits, origin: str) -> None:
        super().__init__(values, origin, NEUTRAL)
        self._traits = traits

    def config(self, family: str) -> dict[str, Any]:
        """The arguments of a LlamaConfig."""
        traits, layers = self._traits, self.whole("num_hidden_layers")
        heads, width = self.whole("num_attention_heads"), self.whole("hidden_size")
        kv_heads = self.whole("num_key_value_heads", heads)
        if heads % kv_heads:
            self.fail("num_key_value_heads", f"a divisor of {heads}", kv_heads)
        head_dim = self.whole("head_dim", width // heads)
        positions = self.whole("max_position_embeddings")
        bias = self.flag("attention_bias")
        types = self.layer_types(layers)
        rope_of, ropes = self.ropes(layers, types, head_dim, positions)
        window = (
            self.whole("sliding_window", 0) if SLIDING in types else self.skip("sliding_window")
        )
        scale = self.number("attention_multiplier", 0.0)
        scale = scale or self.divisor("query_pre_attn_scalar", float(head_dim)) ** -0.5
        values = {
            "model_type": family, "vocab_size": self.whole("vocab_size"), "hidden_size": width,
            "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim,
            "intermediate_size": self.whole("intermediate_size"),
            "max_position_embeddings": positions,
            "rms_norm_eps": self.number("rms_norm_eps", 1e-6), "activation": self.activation(),
            "tie_word_embeddings": self.flag("tie_word_embeddings"),
            "qkv_bias": bias if traits.qkv_bias is None else traits.qkv_bias,
            "out_bias": bias if traits.out_bias is None else traits.out_bias,
            "mlp_bias": self.flag("mlp_bias"),
            "windows": tuple(window if t == SLIDING else 0 for t in types),
            "ropes": ropes, "rope_of": rope_of, "attention_scale": scale,
            "attention_softcap": self.number("attn_logit_softcapping", 0.0),
            "logits_softcap": self.number("final_logit_softcapping", 0.0),
            "embedding_multiplier": self.number("embedding_multiplier", 1.0)
            * (math.sqrt(width) if traits.scaled_embedding else 1.0),
            "residual_multiplier": self.number("residual_multiplier", 1.0),
            "logits_divisor": self.divisor("logits_scaling", 1.0),
            "sparse": (False,) * layers, **(self.experts(layers) if traits.experts else {}),
        }  # fmt: skip
        self.expect_neutral()
        self.expect_all_read()
        return values

    def expect_neutral(self) -> None:
        """Refuse values of published fields that nothing here reads, where they mean something."""
        neutral = {
            "full_attn_mod": 1, "interpolate_factor": 1,  # of Phi: each layer sees all keys
            "use_qk_norm": self._traits.qk_norm == "head",  # of Qwen3-MoE
            "sliding_window_size": self.values.get("sliding_window"),  # of Gemma 2: the same
        }  # fmt: skip
        for name, value in neutral.items():
            if self.get(name, value) != value:
                self.fail(name, show(value), self.values[name])

    # -- parts ------------------------------------------------------------------------------------

    def activation(self) -> str:
        """The gate's."""
        name = self.get("hidden_activation") or self.get("hidden_act", "silu")
        self._read.add("hidden_act")
        if not isinstance(name, str) or name not in ACTIVATIONS:
            self.fail("hidden_act", ", ".join(ACTIVATIONS), name)
        return ACTIVATIONS[name]

    def layer_types(self, layers: int) -> list[str]:
        """`full_attention` or `sliding_attention` for each layer."""
        stated = self.get("layer_types")
        if stated is not None:
            fits = isinstance(stated, list) and len(stated) == layers
            if not fits or any(t not in (FULL, SLIDING) for t in stated):
                self.fail("layer_types", f"{layers} of {FULL}, {SLIDING}", stated)
            return list(stated)
        if not self.values.get("sliding_window"):
            return [FULL] * layers
        kind = self._traits.windows
        if kind in ("later", "used", "unturned"):
            if not self.flag("use_sliding_window"):
                return [FULL] * layers
            if kind == "unturned":
                return [FULL if on else SLIDING for on in self.no_rope(layers)]
            first = self.whole("max_window_layers", 28, least=0) if kind == "later" else 0
            return [SLIDING if i >= first else FULL for i in range(layers)]
        if kind == "even":
            return [FULL if i % 2 else SLIDING for i in range(layers)]
        if kind.isdecimal():
            period = self.whole("sliding_window_pattern", int(kind))
            return [SLIDING if (i + 1) % period else FULL for i in range(layers)]
        return [SLIDING if kind == "all" else FULL] * layers

    def ropes(
        self, layers: int, types: list[str], head_dim: int, positions: int
    ) -> tuple[tuple[int, ...], tuple[Rope, ...]]:
        """Which rotary embedding each layer has, and all of them."""
        theta, scaling = self.get("rope_theta"), self.table("rope_scaling")
        stated = self.table("rope_parameters")
        base = {} if theta is None else {"rope_theta": theta}
        trained = self.values.get("original_max_position_embeddings")
        if trained is not None:
            base["original_max_position_embeddings"] = trained
        every = {"partial_rotary_factor": self.get("partial_rotary_factor", 1.0), **base, **scaling}
        by_type = {}
        for kind in (FULL, SLIDING):
            of_kind = stated.get(kind, stated)
            if not isinstance(of_kind, dict):
                self.fail(f"rope_parameters: {kind}", "an object", of_kind)
            by_type[kind] = {**every, **of_kind}
            length = by_type[kind].get("original_max_position_embeddings")
            if None not in (trained, length) and trained != length:
                self.fail("original_max_position_embeddings", f"{show(length)}, as the rotary "
                          "embedding has it", trained)  # fmt: skip
        local = self.values.get("rope_local_base_freq")
        if local is not None and SLIDING not in stated:
            share = every["partial_rotary_factor"]
            by_type[SLIDING] = {"rope_theta": local, "partial_rotary_factor": share}
        used = list(dict.fromkeys(types))
        columns = self.whole(COLUMNS, 0, least=0)
        ropes = []
        for kind in used:
            part = by_type[kind].pop("partial_rotary_factor")
            part = every["partial_rotary_factor"] if part is None else part
            if type(part) not in (int, float) or not 0 < part <= 1:
                self.fail("partial_rotary_factor", "a number over 0, up to 1", part)
            if part != 1 and not self._traits.partial:
                self.fail("partial_rotary_factor", "1, since heads of this family turn as a whole",
                          part)  # fmt: skip
            dim = columns or int(head_dim * part)
            ropes.append(Rope(by_type[kind], dim, positions, self.origin))
        turns = self.no_rope(layers)
        return tuple(
            used.index(t) if on else -1 for t, on in zip(types, turns, strict=True)
        ), tuple(ropes)

    def experts(self, layers: int) -> dict[str, Any]:
        """What a mixture of experts has, and the layers that have one."""
        name = "num_experts" if self.get("num_experts") is not None else "num_local_experts"
        experts, picks = self.whole(name), self.whole("num_experts_per_tok")
        if picks > min(experts, topk.MOST):
            self.fail("num_experts_per_tok", f"at most {min(experts, topk.MOST)}", picks)
        dense, step = self.get("mlp_only_layers") or [], self.whole("decoder_sparse_step", 1)
        if not isinstance(dense, list) or any(type(i) is not int for i in dense):
            self.fail("mlp_only_layers", "a list of whole numbers", dense)
        return {
            "num_experts": experts, "num_experts_per_tok": picks,
            "moe_intermediate_size": self.whole("moe_intermediate_size"),
            "norm_topk_prob": self.flag("norm_topk_prob"),
            "sparse": tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        }  # fmt: skip

    def no_rope(self, layers: int) -> list[bool]:
        """Whether each layer turns q and k."""
        stated = self.get("no_rope_layers")
        period = self.whole("no_rope_layer_interval", 0, least=0)
        if stated:
            fits = isinstance(stated, list) and len(stated) == layers
            if not fits or any(on not in (0, 1) for on in stated):
                self.fail("no_rope_layers", f"{layers} of 0, 1", stated)
            return [bool(on) for on in stated]
        return [not period or (i + 1) % period != 0 for i in range(layers)]
