"""What a classifier, or a decoder that ranks, has beside its model, from the model's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from centella.errors import WeightsError
from centella.models.bert_head import LabelModel
from centella.models.llama_ranker import LlamaRanker
from centella.tasks.classify.classifier import Classifier, ClassifierConfig, TokenClassifier
from centella.tasks.classify.labels import ACTIVATIONS
from centella.tasks.classify.rank_prompt import RankPrompt
from centella.tasks.text.tokenizer import Tokenizer, read_tokenizer
from centella.weights.folder import max_length
from centella.weights.model_files import read_json


def read_classifier(folder: Path, vocab_size: int) -> Callable[[LabelModel], Any]:
    """Read what a classifier has beside its model, which the function returned takes.

    Raises:
        WeightsError: a file that is malformed.
        MissingExtraError: the library of tokenizers is not installed.
    """
    tokenizer = read_tokenizer(folder, vocab_size)
    longest = max_length(folder)
    stated = _stated_activation(folder)
    lower = read_json(folder / "sentence_bert_config.json").get("do_lower_case", False)

    def classifier(model: LabelModel) -> Classifier | TokenClassifier:
        c = model.config
        several = c.problem == "multi_label_classification" or len(c.labels) == 1
        spread = "sigmoid" if several else "softmax"
        config = ClassifierConfig(
            min(longest, c.positions), stated or ("sigmoid" if len(c.labels) == 1 else "identity"),
            "identity" if c.problem == "regression" else spread, bool(lower),
        )  # fmt: skip
        return (TokenClassifier if c.of_tokens else Classifier)(model, tokenizer, config)

    return classifier


def read_ranker(folder: Path, vocab_size: int) -> Callable[[LlamaRanker], Classifier]:
    """As `read_classifier`, of a decoder that ranks."""
    tokenizer, longest = Tokenizer.from_folder(folder, vocab_size), max_length(folder)
    return lambda model: ranker_of(tokenizer, model, longest)


def ranker_of(tokenizer: Tokenizer, model: LlamaRanker, longest: int | None = None) -> Classifier:
    """A decoder that ranks, for prompts of so many tokens; None: as many as it has positions.

    Raises:
        WeightsError: a tokenizer that has not both answers as tokens.
    """
    prompt, most = RankPrompt(tokenizer), model.config.positions
    model.answers = prompt.answers
    config = ClassifierConfig(min(longest or most, most), "sigmoid", "sigmoid")
    return Classifier(model, tokenizer, config, prompt)


def _stated_activation(folder: Path) -> str:
    """Of a cross-encoder's scores, as its folder says; "" where it does not.

    Source: `CrossEncoder` of sentence-transformers.
    """
    file = folder / "config.json"
    values = read_json(file)
    own = values.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else None
    name = name or read_json(folder / "config_sentence_transformers.json").get("activation_fn")
    name = name or values.get("sbert_ce_default_activation_function")
    kind = str(name or "").rpartition(".")[2].lower()
    if kind not in ("", *ACTIVATIONS):
        raise WeightsError(f"{file}: activation_fn: expected {', '.join(ACTIVATIONS)}, got {kind}")
    return kind
