"""What `centella` answers for a name that it has not: what is to load now, or an error."""

from __future__ import annotations

import sys
from importlib import import_module

from centella.tensors.hints import module_missing

# Files, and their public names. Each loads with all that it alone needs: a program has few tasks,
# and one of kernels alone has none.
NAMES: dict[str, str] = {
    "centella.audio.log_mel": "log_mel",
    "centella.nn.kv_cache": "KVCache",
    "centella.nn.matmul_cache": "MatmulCache",
    "centella.tasks.classify.classifier": "Classifier TokenClassifier",
    "centella.tasks.embed.embedder": "Embedder",
    "centella.tasks.generate.generator": "Generation Generator",
    "centella.tasks.classify.labels": "Label Ranked Span",
    "centella.tasks.load": "load",
    "centella.tasks.generate.logprobs": "TokenLogprobs",
    "centella.tasks.schedule.request": "Request",
    "centella.tasks.generate.sampling": "Sampling",
    "centella.tasks.schedule.scheduler": "Scheduler",
    "centella.tasks.search": "Index Matches",
    "centella.tasks.generate.stream": "Stream",
    "centella.tasks.transcribe.transcriber": "Transcriber",
}
LATER: dict[str, str] = {name: file for file, names in NAMES.items() for name in names.split()}
ROOMS: tuple[str, ...] = ("audio", "nn", "serving")  # the last loads asyncio


def module_getattr(name: str) -> object:
    """The `__getattr__` of `centella`: what loads with its first use.

    Raises:
        AttributeError: for any other name; with what to write, where that is known.
    """
    if name in ROOMS:
        return import_module(f"centella.{name}")  # which binds it there
    if name not in LATER:
        raise module_missing(name)
    value = getattr(import_module(LATER[name]), name)
    setattr(sys.modules["centella"], name, value)
    return value


def module_dir() -> list[str]:
    """The `__dir__` of `centella`: the public names, and none of the rooms."""
    return sorted(sys.modules["centella"].__all__)
