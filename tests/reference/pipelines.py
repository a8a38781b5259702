"""Folders that sentence-transformers writes, and what it makes of texts with them in float64.

    pip install --no-deps sentence-transformers scipy scikit-learn joblib threadpoolctl narwhals \
        cloudpickle
    python tests/reference/pipelines.py

Writes `tests/data/pipelines/NAME/`: what the library saves beside the transformer, which is that of
`tests/data/tiny-bert-cls`; `texts.json`; and `expected.npz`: the vectors NAME [texts, dim],
NAME.query and NAME.document, the similarities NAME.similarity [texts, texts], the quantised vectors
NAME.PRECISION, and of the cross-encoder its scores of every text for the first, and their order.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.base.modules.normalize import Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import quantize_embeddings

DATA = Path(__file__).resolve().parents[1] / "data"
OUT, BASE = DATA / "pipelines", DATA / "tiny-bert-cls"
TEXTS = [
    "a storm came up", "The keeper of the lighthouse counted 42 ships before the storm.", "",
    "  spaces \t and\nlines ", "Le cœur déçu, l'âme plutôt naïve", "x", "rain " * 40, "storm, rain",
    "東京都", "The flash comes before the thunder, and the thunder before the rain.",
]  # fmt: skip
PROMPTS = {"query": "search: ", "document": "text: "}
RANGES = np.array([[-0.5] * 32, [0.5] * 32], np.float32)
TRANSFORMER = ("model.safetensors", "tokenizer.json", "vocab.txt", "README.md")  # as in BASE
# Of each folder: its poolings, (size, activation) of dense layers, whether normalised, the rest.
FOLDERS: dict[str, tuple[Any, list[tuple[int, Any]], bool, dict[str, Any]]] = {
    "mean": ("mean", [], False, {}),
    "cls": ("cls", [], True, {}),
    "max": ("max", [], False, {"similarity_fn_name": "euclidean"}),
    "mean_sqrt_len": ("mean_sqrt_len_tokens", [], False, {"similarity_fn_name": "manhattan"}),
    "weightedmean": ("weightedmean", [], False, {"similarity_fn_name": "dot"}),
    "lasttoken": ("lasttoken", [], True, {}),
    "cls-max": (("cls", "max"), [], False, {}),
    "dense": ("mean", [(20, torch.nn.Tanh()), (12, torch.nn.Identity())], True, {}),
    "prompts": ("mean", [], True, {"prompts": PROMPTS, "default_prompt_name": "document"}),
}


def folder_of(name: str) -> SentenceTransformer:
    """A model, saved as a folder; of its dense layers the weights are drawn."""
    pooling, dense, normalize, options = FOLDERS[name]
    modules: list[Any] = [Transformer(str(BASE), max_seq_length=24)]
    modules.append(Pooling(modules[0].get_embedding_dimension(), pooling))
    width = modules[1].get_embedding_dimension()
    for size, activation in dense:
        modules.append(Dense(width, size, activation_function=activation))
        width = size
    if normalize:
        modules.append(Normalize())
    model = SentenceTransformer(modules=modules, device="cpu", **options)
    model.save(str(OUT / name))
    for file in TRANSFORMER:
        (OUT / name / file).unlink(missing_ok=True)
    return model.double().eval()


def vectors(name: str) -> dict[str, np.ndarray]:
    model = folder_of(name)
    plain = model.encode(TEXTS)
    arrays = {name: plain, f"{name}.similarity": model.similarity(plain, plain).numpy()}
    if name == "prompts":
        arrays |= {"prompts.query": model.encode_query(TEXTS)}
        arrays |= {"prompts.document": model.encode_document(TEXTS)}
        arrays |= {"prompts.prompt": model.encode(TEXTS, prompt="note: ")}
    if name == "cls":
        for precision in ("int8", "uint8", "binary", "ubinary"):
            arrays[f"cls.{precision}"] = quantize_embeddings(plain, precision, RANGES)
        arrays["cls.dim"] = model.encode(TEXTS, truncate_dim=20, normalize_embeddings=True)
    return arrays


def cross_encoder() -> dict[str, np.ndarray]:
    """A BERT with a head of one label; scores and order of the texts for the first."""
    folder, config = OUT / "cross-encoder", transformers.BertConfig.from_pretrained(BASE)
    config.num_labels = 1
    torch.manual_seed(5)
    bert = transformers.BertForSequenceClassification(config)
    with torch.no_grad():
        for p in bert.parameters():
            p.copy_((p.ndim == 1) + 0.15 * torch.randn_like(p))
    bert.to(torch.float16).save_pretrained(folder)  # a smaller file; then f64 of what is stored
    transformers.AutoTokenizer.from_pretrained(BASE).save_pretrained(folder)
    model = CrossEncoder(str(folder), device="cpu", max_length=24)
    model.save(str(folder))
    for file in TRANSFORMER[1:]:
        (folder / file).unlink(missing_ok=True)
    model.double().eval()
    pairs = [(TEXTS[0], text) for text in TEXTS]
    ranked = model.rank(TEXTS[0], TEXTS)
    return {
        "cross-encoder": model.predict(pairs),
        "cross-encoder.logits": model.predict(pairs, activation_fn=torch.nn.Identity()),
        "cross-encoder.order": np.array([each["corpus_id"] for each in ranked]),
    }


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    torch.manual_seed(3)
    arrays: dict[str, np.ndarray] = {}
    for name in FOLDERS:
        arrays |= vectors(name)
    arrays |= cross_encoder()
    np.savez_compressed(OUT / "expected.npz", allow_pickle=False, ranges=RANGES, **arrays)
    (OUT / "texts.json").write_text(json.dumps(TEXTS, indent=1) + "\n", encoding="utf-8")
    for name, values in arrays.items():
        print(name, values.dtype, values.shape)


if __name__ == "__main__":
    main()
