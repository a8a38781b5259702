"""A model from a GGUF file, and what its task has beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from centella.errors import WeightsError
from centella.models import bert_gguf, llama_gguf
from centella.models.llama import LlamaModel
from centella.tasks.classify.classifier import Classifier
from centella.tasks.classify.folder import ranker_of
from centella.tasks.embed.embedder import Embedder
from centella.tasks.embed.pooling import EmbedderConfig
from centella.tasks.families import (
    EMBEDDING_DECODER,
    FAMILIES,
    RANKING_DECODER,
    Family,
    ModelFiles,
    family_of,
)
from centella.tasks.generate.generator import Generator
from centella.tasks.generate.sampling import GeneratorConfig
from centella.tasks.text.gguf import begin_id, read_template, read_tokenizer, stop_ids
from centella.weights.gguf import GGUF, open_gguf
from centella.weights.model_files import show

if TYPE_CHECKING:
    from centella.tasks.families import Task

# By the number that a file has for it; 0: none is said, and 4: it ranks.
POOLINGS = {0: None, 1: "mean", 2: "cls", 3: "lasttoken", 4: None}


def open_files(path: Path, task: str | None) -> ModelFiles:
    """Open a file, for a task or for what it says itself.

    Raises:
        WeightsError: a malformed file, or of an architecture that is not supported.
    """
    file, origin = open_gguf(path), str(path)
    if file.values.get("general.architecture") == bert_gguf.ARCHITECTURE:
        return ModelFiles(
            origin, origin, bert_gguf.config_values(file), FAMILIES["bert"],
            lambda config: bert_gguf.tensors_of(file), lambda _: read_embedder(file, "mean"),
        )  # fmt: skip
    values = llama_gguf.config_values(file)
    family, read = _decoder(file, family_of(origin, values), task)
    return ModelFiles(
        origin, origin, values, family,
        lambda config: llama_gguf.tensors_of(file, config.head_dim), lambda _: read(),
    )  # fmt: skip


def _decoder(
    file: GGUF, family: Family, task: str | None
) -> tuple[Family, Callable[[], Callable[[Any], Task]]]:
    """What a decoder is used for, and what reads that task: as asked, else as its pooling says."""
    if task == "classify":
        return RANKING_DECODER, lambda: read_ranker(file)
    if task == "embed" or (task is None and pooling_of(file)):
        return EMBEDDING_DECODER, lambda: read_embedder(file, "lasttoken")
    return family, lambda: read_generator(file)


def pooling_of(file: GGUF) -> str | None:
    """The pooling that a file states; None: none.

    Raises:
        WeightsError: another number.
    """
    key = f"{file.values.get('general.architecture')}.pooling_type"
    number = file.values.get(key, 0)
    if type(number) is not int or number not in POOLINGS:
        raise WeightsError(f"{file.file}: {key}: expected 0 to 4, got {show(number)}")
    return POOLINGS[number]


def read_embedder(file: GGUF, usual: str) -> Callable[[Any], Embedder]:
    """Read what an Embedder has beside its model, which the function returned takes.

    Vectors have length 1, as llama.cpp gives them.

    Args:
        usual: the pooling where the file states none.

    Raises:
        WeightsError, MissingExtraError: as for the tokenizer of a Generator.
    """
    tokenizer = read_tokenizer(file) or file.file
    pooling = pooling_of(file) or usual

    def embedder(model: Any) -> Embedder:
        return Embedder(model, tokenizer, EmbedderConfig(model.config.positions, pooling, True))

    return embedder


def read_ranker(file: GGUF) -> Callable[[Any], Classifier]:
    """As `read_embedder`, of a decoder that ranks.

    Raises:
        WeightsError: the file has no tokenizer.
    """
    tokenizer = read_tokenizer(file)
    if tokenizer is None:
        raise WeightsError(f"{file.file}: expected a tokenizer, which a decoder that ranks needs")
    return partial(ranker_of, tokenizer)


def read_generator(file: GGUF) -> Callable[[LlamaModel], Generator]:
    """As `read_embedder`, of a decoder that generates."""
    config = GeneratorConfig(stop_ids(file), begin_id(file))
    tokenizer, template = read_tokenizer(file) or file.file, read_template(file)
    return partial(Generator, tokenizer=tokenizer, config=config, template=template)
