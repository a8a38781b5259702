"""What an Embedder has beside its model, from the model's folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from centella.tasks.embed.embedder import Embedder
from centella.tasks.embed.pooling import Dense, EmbedderConfig
from centella.tasks.embed.token_outputs import FILES, load_head
from centella.tasks.text.tokenizer import read_tokenizer
from centella.weights.model_files import is_file
from centella.weights.safetensors import StoredTensor, read_file
from centella.weights.torch_zip import read_torch


def read_embedder(
    folder: Path, vocab_size: int, pooling: str | None = None
) -> Callable[[Any], Embedder]:  # fmt: skip
    """Read what an Embedder has beside its model, which the function returned takes.

    Args:
        pooling: of a folder without modules.json.

    Raises:
        WeightsError: a file that is malformed.
        MissingExtraError: the folder has a tokenizer, and its library is not installed.
    """
    config = EmbedderConfig.from_folder(folder)
    if pooling is not None and not is_file(folder / "modules.json"):
        config = replace(config, pooling=pooling)
    tokenizer, heads = read_tokenizer(folder, vocab_size), read_heads(folder)

    def embedder(model: Any) -> Embedder:
        config.width(model.config.hidden_size)  # refuses now what does not fit
        most = min(config.max_length, model.config.positions)
        dense = [Dense.load(d, model.device) for d in config.dense]
        linears = {
            output: load_head(output, tensors, model.config.hidden_size, model.device)
            for output, tensors in heads.items()
        }
        return Embedder(model, tokenizer, replace(config, max_length=most), dense, linears)

    return embedder


def read_decoder_embedder(folder: Path, vocab_size: int) -> Callable[[Any], Embedder]:
    """As `read_embedder`; without modules.json a text is its last token's state."""
    return read_embedder(folder, vocab_size, "lasttoken")


def read_heads(folder: Path) -> dict[str, Mapping[str, StoredTensor]]:
    """The tensors of the products that a folder has for outputs of tokens, by output.

    Raises:
        WeightsError: a file that is malformed.
    """
    readers = {".safetensors": read_file, ".pt": read_torch}
    heads: dict[str, Mapping[str, StoredTensor]] = {}
    for output, name in FILES.items():
        files = [(folder / f"{name}{end}", read) for end, read in readers.items()]
        opened = next((read(file) for file, read in files if is_file(file)), None)
        if opened is not None:
            heads[output] = opened
    return heads
