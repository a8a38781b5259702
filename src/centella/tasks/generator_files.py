"""What a Generator has beside its model, from a folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from centella.tasks.chat import CONFIG, ChatTemplate, special_tokens
from centella.tasks.generate import Generator
from centella.tasks.sampling import GeneratorConfig
from centella.weights.folder import TOKENIZER
from centella.weights.model_files import kind, read_json

if TYPE_CHECKING:
    from centella.models.llama import LlamaModel
    from centella.weights.gguf import GGUF


def read_gguf(file: GGUF) -> Callable[[LlamaModel], Generator]:
    """Read what a Generator has beside its model from a GGUF file; as `read_generator`."""
    from centella.tasks import text_gguf

    config = GeneratorConfig(text_gguf.stop_ids(file), text_gguf.begin_id(file))
    tokenizer = text_gguf.read_tokenizer(file) or file.file
    template = text_gguf.read_template(file)
    return partial(Generator, tokenizer=tokenizer, config=config, template=template)


def read_generator(folder: Path, vocab_size: int) -> Callable[[LlamaModel], Generator]:
    """Read what a Generator has beside its model, which the function returned takes.

    Raises:
        WeightsError: a file that is malformed.
        MissingExtraError: the folder has a tokenizer, and its library is not installed.
    """
    from centella.tasks.text import Tokenizer

    config = GeneratorConfig.from_folder(folder)
    file = folder / TOKENIZER
    absent = kind(file) == "nothing at that path"
    tokenizer = file if absent else Tokenizer.from_folder(folder, vocab_size)
    template = None if absent else ChatTemplate.from_folder(folder)
    if isinstance(tokenizer, Tokenizer):
        eos = special_tokens(read_json(folder / CONFIG)).get("eos_token", "")
        found = {i for t, i in tokenizer.native.get_vocab().items() if t == eos and i < vocab_size}
        config = replace(config, stop_ids=config.stop_ids | found)
    return partial(Generator, tokenizer=tokenizer, config=config, template=template)
