"""What `centella` answers for a name that it has not: what is to load now, or an error."""

from __future__ import annotations

import sys
from importlib import import_module

from centella.tensors.hints import module_missing

# The files of classes that few programs need, with all that they alone load.
LATER: dict[str, str] = {
    "Index": "centella.tasks.search", "Matches": "centella.tasks.search",
    "Scheduler": "centella.tasks.schedule", "Transcriber": "centella.tasks.transcribe",
}  # fmt: skip


def module_getattr(name: str) -> object:
    """The `__getattr__` of `centella`: what loads with its first use.

    Raises:
        AttributeError: for any other name; with what to write, where that is known.
    """
    if name in LATER:
        return getattr(import_module(LATER[name]), name)
    if name != "serving":
        raise module_missing(name)
    import centella.serving as serving  # `from centella` would ask here again

    return serving


def module_dir() -> list[str]:
    """The `__dir__` of `centella`: the public names, and none of the rooms."""
    return sorted(sys.modules["centella"].__all__)
