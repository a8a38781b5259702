"""What an Embedder, or a decoder that ranks, has beside its model, from a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from centella.errors import WeightsError
from centella.tasks.classify import Classifier, ranker_of
from centella.tasks.embed import Embedder
from centella.tasks.pooling import EmbedderConfig
from centella.tasks.text_gguf import read_tokenizer
from centella.weights.gguf import GGUF
from centella.weights.model_files import show

# By the number that a file has for it; 0: none is said, and 4: it ranks.
POOLINGS = {0: None, 1: "mean", 2: "cls", 3: "lasttoken", 4: None}


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


def read_gguf_embedder(file: GGUF, usual: str) -> Callable[[Any], Embedder]:
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


def read_gguf_ranker(file: GGUF) -> Callable[[Any], Classifier]:
    """As `read_gguf_embedder`, of a decoder that ranks.

    Raises:
        WeightsError: the file has no tokenizer.
    """
    tokenizer = read_tokenizer(file)
    if tokenizer is None:
        raise WeightsError(f"{file.file}: expected a tokenizer, which a decoder that ranks needs")
    return partial(ranker_of, tokenizer)
