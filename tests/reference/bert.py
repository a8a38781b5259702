"""Small random BERT checkpoints in sentence-transformers' folder format, and their activations.

A checkpoint is written with our own code (NumPy's generator, fixed JSON), so that it is equal to
the byte whatever the versions; PyTorch and transformers only compute what it gives.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, BertModel

Arrays = dict[str, np.ndarray]

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = """
a about after again all also an and any are as at away back be because been before between big
black blue book boy bridge bright but by call came can chair city clear close cloud cold come could
day deep did do door down dry each earth early east end even every far fast few field find fire
first five flash for four from garden gave get girl give go good great green ground had hand hard
has have he heard help her here high him his home hot house how i if in into is it its just keep
kind know lake land large last late leaf learn left life light like line little long look low made
make man many may me mile moon more morning most mother mountain much must my name near never new
next night no north not now of off old on once one only open or other our out over own paper part
people place play point rain read red rest right river road rock room round run sand saw say sea
second see sentence she short should show sky slow small snow so some song soon sound south spring
star stay still stone stop storm street strong such summer sun table take tell ten text than that
the their them then there these they thing think this those three through thunder time to told too
tree turn two under up upon us use very voice walk wall want warm was water way we well went were
west what when where which white who why will wind window winter with word work world would write
year yellow yet you young your
"""

BATCHES = [
    [
        "The flash comes before the thunder.",
        "",
        "Rain!",
        "A small boat went down the river, past the old stone bridge and the yellow house; "
        "nobody saw it go, and by the morning there was only cold water and white sand. "
        "Then the wind came up from the south, and the storm after it, for five days.",
        "Wörter, naïve café: 42 = 6 * 7",
    ],
    [
        "one two three four five",
        "unbelievable thunderstorms rolled southward",
        "日本語 and 🙂",
    ],
]


@dataclass(frozen=True)
class Shape:
    """What distinguishes one tiny checkpoint from another."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    activation: str
    eps: float
    pooling: str
    normalize: bool
    max_seq_length: int
    pooler: bool
    seed: int


TINY = Shape(48, 3, 3, 80, "gelu", 1e-12, "mean", True, 48, True, 1)
TINY_CLS = Shape(32, 2, 2, 72, "gelu_new", 1e-5, "cls", False, 24, False, 2)
POSITIONS = 64


def vocabulary() -> list[str]:
    """1000 WordPiece entries: special, characters, words, then syllables."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    marks = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
    singles = [*marks, *letters, *(f"##{c}" for c in letters)]
    open_syllables = ["".join(s) for s in product("bcdfghjklmnprstvwyz", "aeiou")]
    closed = ["".join(s) for s in product("bcdfglmnprstv", "aeiou", "dlmnrst")]
    pieces = [*open_syllables, *(f"##{s}" for s in (*open_syllables, *closed))]
    unique = dict.fromkeys([*SPECIAL, *singles, *WORDS.split(), *pieces])
    return list(unique)[:1000]


def write_tokenizer(folder: Path, vocab: list[str]) -> None:
    """BERT's pipeline over `vocab`; stored with a truncation and padding that readers undo."""
    ids = {token: i for i, token in enumerate(vocab)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    write_json(folder / "special_tokens_map.json", names)
    rest = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "strip_accents": None}
    limit = {"tokenize_chinese_chars": True, "model_max_length": POSITIONS}
    write_json(folder / "tokenizer_config.json", {**names, **rest, **limit})
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")


def write_configs(folder: Path, s: Shape, vocab_size: int) -> None:
    """The JSON files of a sentence-transformers folder."""
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": vocab_size,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "intermediate_size": s.intermediate,
        "hidden_act": s.activation,
        "layer_norm_eps": s.eps,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    }
    write_json(folder / "config.json", config)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    kinds |= {"2_Normalize": "Normalize"} if s.normalize else {}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    write_json(folder / "modules.json", modules)
    sentence = {"max_seq_length": s.max_seq_length, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", sentence)
    modes = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
    pooling: dict[str, Any] = {"word_embedding_dimension": s.hidden}
    pooling |= {f"pooling_mode_{name}": mode == s.pooling for mode, name in modes.items()}
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling" / "config.json", pooling)


def random_weights(s: Shape, vocab_size: int) -> Arrays:
    """BERT's parameters, of a size at which no part of the network is near the identity."""
    rng = np.random.default_rng(s.seed)
    weights: Arrays = {}

    def normal(name: str, *shape: int, mean: float = 0.0) -> None:
        values = mean + 0.2 * rng.standard_normal(shape)
        weights[name] = values.astype(np.float32)

    def linear(name: str, rows: int, columns: int) -> None:
        normal(f"{name}.weight", rows, columns)
        normal(f"{name}.bias", rows)

    def norm(name: str) -> None:
        normal(f"{name}.weight", s.hidden, mean=1.0)
        normal(f"{name}.bias", s.hidden)

    tables = {"word": vocab_size, "position": POSITIONS, "token_type": 2}
    for kind, rows in tables.items():
        normal(f"embeddings.{kind}_embeddings.weight", rows, s.hidden)
    norm("embeddings.LayerNorm")
    weights["embeddings.position_ids"] = np.arange(POSITIONS, dtype=np.int64)[None]
    for i in range(s.layers):
        layer = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{part}", s.hidden, s.hidden)
        linear(f"{layer}.attention.output.dense", s.hidden, s.hidden)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", s.intermediate, s.hidden)
        linear(f"{layer}.output.dense", s.hidden, s.intermediate)
        norm(f"{layer}.output.LayerNorm")
    if s.pooler:
        linear("pooler.dense", s.hidden, s.hidden)
    return weights


def write_checkpoint(folder: Path, s: Shape) -> None:
    """A whole model folder, with what it computes."""
    folder.mkdir()
    vocab = vocabulary()
    write_tokenizer(folder, vocab)
    write_configs(folder, s, len(vocab))
    save_file(random_weights(s, len(vocab)), folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "texts.json", BATCHES)
    arrays: Arrays = {}
    for i, texts in enumerate(BATCHES):
        for name, array in activations(folder, s, texts).items():
            arrays[f"batch{i}.{name}"] = array
    # NumPy's types take every keyword for its one flag.
    np.savez_compressed(folder / "activations.npz", **arrays)  # type: ignore[arg-type]


def activations(folder: Path, s: Shape, texts: list[str]) -> Arrays:
    """Of one padded batch, computed in float64, kept as float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(
        texts, padding=True, truncation=True, max_length=s.max_seq_length, return_tensors="pt"
    )
    model = load_bert(folder).double()
    with torch.inference_mode():
        out = model(**batch, output_hidden_states=True)
    vectors = pool(out.last_hidden_state, batch["attention_mask"], s.pooling, s.normalize)
    states = dict(zip(["embeddings", *(f"layer{i}" for i in range(s.layers))], out.hidden_states,
                      strict=True))  # fmt: skip
    floats = {**states, "pooled": vectors}
    arrays = {name: x.numpy().astype(np.float32) for name, x in floats.items()}
    ids = {name: batch[name].numpy().astype(np.int32) for name in ("input_ids", "attention_mask")}
    return ids | arrays


def load_bert(folder: Path) -> BertModel:
    """The encoder in float32 with attention written out, no dropout."""
    model = BertModel.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, add_pooling_layer=False
    )
    return model.eval()


def pool(states: torch.Tensor, mask: torch.Tensor, how: str, normalize: bool) -> torch.Tensor:
    """One vector a text, as sentence-transformers' Pooling and Normalize."""
    if how == "cls":
        vectors = states[:, 0]
    else:
        weight = mask[..., None].to(states.dtype)
        vectors = (states * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
    return torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors


def write_json(path: Path, value: Any) -> None:
    """JSON for reading: indented, ASCII, a newline at the end."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
