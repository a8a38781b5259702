"""The families of BERT-like encoders: what each has that its config.json states otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct


class Traits(Struct, frozen=True):
    """What a family has that its config.json does not state, or states in other words.

    Attributes:
        prefixes: of tensor names in checkpoints with a head.
        tensors: parts of the checkpoint's tensor names, and the parts of BERT's, in this order.
        fields: names in BERT's config.json, and the family's, of which the first that is there is
            read.
        defaults: of fields that may be missing.
        fixed: fields that must have one of these values, where they are set.
        more: fields beyond BERT's.
        token_types: whether token types are embedded.
        padded: positions count from `pad_token_id` + 1, as fairseq has it.
        padding: the id in its place, whatever `pad_token_id` is.
        rotary: rotary embedding, in place of a table of positions.
        packed: whether q, k and v are one tensor of the checkpoint.
        gated: the feed-forward network is gated: "" no, "apart" gate and up are two tensors, "gate
            first" and "up first" one.
        norm_first: parts normalise their input, and a last norm the result; else their sum.
        layer_tensors: tensors of a layer.
        head: of classifiers: the tensor names of its product, of the label's product, its
            activation.
    """

    prefixes: tuple[str, ...] = ()
    tensors: tuple[tuple[str, str], ...] = ()
    fields: Mapping[str, tuple[str, ...]] = {}
    defaults: Mapping[str, Any] = {}
    fixed: Mapping[str, tuple[Any, ...]] = {}
    more: tuple[str, ...] = ()
    token_types: bool = True
    padded: bool = False
    padding: int | None = None
    rotary: bool = False
    packed: bool = False
    gated: str = ""
    norm_first: bool = False
    layer_tensors: int = 16
    head: tuple[str, str, str] = ("pooler.dense", "classifier", "tanh")

    def bare(self, name: str) -> str:
        """A tensor's name without the prefix that a checkpoint with a head has."""
        prefix = next((p for p in self.prefixes if name.startswith(p)), "")
        return name.removeprefix(prefix)


DENSE_HEAD = ("classifier.dense", "classifier.out_proj", "tanh")
ROBERTA = Traits(prefixes=("roberta.",), padded=True, head=DENSE_HEAD)
GTE = Traits(
    prefixes=("new.", "gte."), rotary=True, packed=True, gated="up first", layer_tensors=11,
    tensors=(
        ("attention.qkv_proj", "attention.self.qkv"),
        ("attention.o_proj", "attention.output.dense"),
        ("attn_ln", "attention.output.LayerNorm"), ("mlp_ln", "output.LayerNorm"),
        ("mlp.up_gate_proj", "intermediate.dense"), ("mlp.down_proj", "output.dense"),
    ),
    defaults={"inner_bias": False, "type_vocab_size": 1, "rope_theta": 160_000.0},
    fixed={"position_embedding_type": ("rope",), "layer_norm_type": ("layer_norm",),
           "pack_qkv": (True,)},
    more=("rope_theta", "rope_scaling", "rope_parameters"),
)  # fmt: skip
# By `model_type`.
FAMILIES: dict[str, Traits] = {
    "albert": Traits(
        prefixes=("albert.",), head=("pooler", "classifier", "tanh"),
        tensors=(
            ("encoder.embedding_hidden_mapping_in", "embeddings.project"),
            ("attention.query", "attention.self.query"), ("attention.key", "attention.self.key"),
            ("attention.value", "attention.self.value"),
            ("attention.dense", "attention.output.dense"),
            ("attention.LayerNorm", "attention.output.LayerNorm"),
            ("full_layer_layer_norm", "output.LayerNorm"), ("ffn_output.", "output.dense."),
            ("ffn.", "intermediate.dense."),
        ),
        defaults={"embedding_size": 128, "hidden_act": "gelu_new"},
        more=("embedding_size", "num_hidden_groups", "inner_group_num"),
    ),
    "bert": Traits(prefixes=("bert.",), tensors=(("LayerNorm.gamma", "LayerNorm.weight"),
                                            ("LayerNorm.beta", "LayerNorm.bias"))),
    "camembert": ROBERTA,
    "distilbert": Traits(
        prefixes=("distilbert.",), token_types=False, head=("pre_classifier", "classifier", "relu"),
        tensors=(
            ("transformer.layer", "encoder.layer"), ("attention.q_lin", "attention.self.query"),
            ("attention.k_lin", "attention.self.key"), ("attention.v_lin", "attention.self.value"),
            ("attention.out_lin", "attention.output.dense"),
            ("sa_layer_norm", "attention.output.LayerNorm"), ("ffn.lin1", "intermediate.dense"),
            ("ffn.lin2", "output.dense"), ("output_layer_norm", "output.LayerNorm"),
        ),
        fields={"hidden_size": ("dim",), "num_hidden_layers": ("n_layers",),
                "num_attention_heads": ("n_heads",), "intermediate_size": ("hidden_dim",),
                "hidden_act": ("activation",)},
        defaults={"max_position_embeddings": 512},
    ),
    "electra": Traits(
        prefixes=("electra.",), tensors=(("embeddings_project", "embeddings.project"),),
        defaults={"embedding_size": 128}, more=("embedding_size",),
        head=("classifier.dense", "classifier.out_proj", "gelu"),
    ),
    "gte": GTE,
    "modernbert": Traits(
        prefixes=("model.",), token_types=False, rotary=True, packed=True, gated="gate first",
        norm_first=True, layer_tensors=5, head=("head.dense", "classifier", "gelu"),
        tensors=(
            ("embeddings.tok_embeddings", "embeddings.word_embeddings"),
            ("embeddings.norm", "embeddings.LayerNorm"), ("final_norm", "encoder.norm"),
            ("attn_norm", "attention.norm"), ("attn.Wqkv", "attention.self.qkv"),
            ("attn.Wo", "attention.output.dense"), ("mlp_norm", "intermediate.norm"),
            ("mlp.Wi", "intermediate.dense"), ("mlp.Wo", "output.dense"),
        ),
        fields={"layer_norm_eps": ("norm_eps", "layer_norm_eps"),
                "hidden_act": ("hidden_activation",), "inner_bias": ("mlp_bias",)},
        defaults={"layer_norm_eps": 1e-5, "attention_bias": False, "inner_bias": False,
                  "mlp_bias": False, "norm_bias": False},
        more=("attention_bias", "mlp_bias", "norm_bias", "local_attention", "layer_types",
              "global_attn_every_n_layers", "global_rope_theta", "local_rope_theta",
              "rope_parameters"),
    ),
    "mpnet": Traits(
        prefixes=("mpnet.",), token_types=False, padded=True, padding=1, head=DENSE_HEAD,
        tensors=(
            ("attention.attn.q.", "attention.self.query."),
            ("attention.attn.k.", "attention.self.key."),
            ("attention.attn.v.", "attention.self.value."),
            ("attention.attn.o.", "attention.output.dense."),
            ("attention.LayerNorm", "attention.output.LayerNorm"),
        ),
        defaults={"relative_attention_num_buckets": 32, "pad_token_id": 1},
        more=("relative_attention_num_buckets",),
    ),
    "new": GTE,
    "nomic_bert": Traits(
        prefixes=("nomic_bert.", "bert."), rotary=True, packed=True, gated="apart", layer_tensors=9,
        tensors=(
            ("emb_ln", "embeddings.LayerNorm"), ("attn.Wqkv", "attention.self.qkv"),
            ("attn.out_proj", "attention.output.dense"), ("mlp.fc11", "intermediate.up"),
            ("mlp.fc12", "intermediate.gate"), ("mlp.fc2", "output.dense"),
            ("norm1", "attention.output.LayerNorm"), ("norm2", "output.LayerNorm"),
        ),
        fields={"hidden_size": ("hidden_size", "n_embd"),
                "num_hidden_layers": ("num_hidden_layers", "n_layer"),
                "num_attention_heads": ("num_attention_heads", "n_head"),
                "intermediate_size": ("intermediate_size", "n_inner"),
                "max_position_embeddings": ("max_position_embeddings", "n_positions"),
                "layer_norm_eps": ("layer_norm_eps", "layer_norm_epsilon"),
                "hidden_act": ("hidden_act", "activation_function"),
                "rope_theta": ("rope_theta", "rotary_emb_base"),
                "attention_bias": ("qkv_proj_bias",), "inner_bias": ("mlp_fc1_bias",),
                "mlp_bias": ("mlp_fc2_bias",)},
        defaults={"attention_bias": False, "inner_bias": False, "mlp_bias": False,
                  "hidden_act": "silu", "rope_theta": 1000.0},
        fixed={"prenorm": (False,), "parallel_block": (False,), "causal": (False,),
               "use_rms_norm": (False,), "rotary_emb_fraction": (1.0,),
               "rotary_emb_interleaved": (False,), "rotary_emb_scale_base": (None,),
               "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
        more=("rope_theta", "rope_parameters", "rotary_scaling_factor", "max_trained_positions",
              "head_dim"),
    ),
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
}  # fmt: skip
FIXED: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute",), "is_decoder": (False,),
    "add_cross_attention": (False,), "num_memory_blocks": (0,), "net_structure_type": (0,),
    "gap_size": (0,), "chunk_size_feed_forward": (0,),
}  # fmt: skip
OF_BERT = """vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size
    max_position_embeddings type_vocab_size layer_norm_eps hidden_act pad_token_id""".split()
# Fields that change nothing here: identity, training, heads, and what other libraries do.
NEUTRAL = frozenset(
    """architectures model_type torch_dtype dtype transformers_version use_cache initializer_range
    initializer_cutoff_factor initializer_factor bos_token_id eos_token_id cls_token_id sep_token_id
    mask_token_id auto_map _name_or_path output_attentions output_hidden_states output_past
    return_dict gradient_checkpointing directionality id2label label2id num_labels _num_labels
    problem_type
    finetuning_task sentence_transformers tokenizer_class tie_word_embeddings tie_weights_
    unpad_inputs use_memory_efficient_attention logn_attention_clip1 decoder_bias
    classifier_activation classifier_bias classifier_pooling sbert_ce_default_activation_function
    deterministic_flash_attn reference_compile repad_logits_with_grad sparse_prediction
    sparse_pred_ignore_index down_scale_factor max_trained_positions use_flash_attn use_xentropy
    fused_bias_fc fused_dropout_add_ln pad_vocab_size_multiple reorder_and_upcast_attn n_ctx
    dense_seq_output last_layer_subset sinusoidal_pos_embds task_specific_params language
    name summary_type torchscript use_bfloat16 attn_implementation _attn_implementation
    _attn_implementation_autoset transformers.js_config layernorm_type hidden_size_per_head
    use_return_dict is_encoder_decoder prefix pruned_heads position_biased_input
    embedding_layer xla_device adapters onnx_config""".split()
)
TRAINING = re.compile(r".*(dropout|_drop$|pdrop).*|(summary|pooler|classifier_drop)_.*|.*_qat_.*")
