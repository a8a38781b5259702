"""What a Generator has beside its model, from the model's folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from centella.errors import WeightsError
from centella.models.llama import LlamaModel
from centella.tasks.chat.messages import CONFIG, ChatTemplate, special_tokens
from centella.tasks.generate.generator import Generator
from centella.tasks.generate.sampling import GeneratorConfig
from centella.tasks.text.tokenizer import Tokenizer, read_tokenizer
from centella.weights.model_files import read_json, show


def read_generator(folder: Path, vocab_size: int) -> Callable[[LlamaModel], Generator]:
    """Read what a Generator has beside its model, which the function returned takes.

    Raises:
        WeightsError: a file that is malformed.
        MissingExtraError: the folder has a tokenizer, and its library is not installed.
    """
    config, template = GeneratorConfig.from_folder(folder), None
    tokenizer = read_tokenizer(folder, vocab_size)
    if isinstance(tokenizer, Tokenizer):
        template = ChatTemplate.from_folder(folder)
        eos = special_tokens(read_json(folder / CONFIG)).get("eos_token", "")
        try:
            end = tokenizer.native.token_to_id(eos)
        except UnicodeEncodeError as error:
            raise WeightsError(
                f"{folder / CONFIG}: eos_token: expected valid Unicode, got {show(eos)}"
            ) from error
        if end is not None and end < vocab_size:
            config = replace(config, stop_ids=config.stop_ids | {end})
    return partial(Generator, tokenizer=tokenizer, config=config, template=template)
