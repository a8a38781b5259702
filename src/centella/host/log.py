"""The loggers of the library, for modules that `import centella` loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logging import Logger


def logger(name: str) -> Logger:
    """The logger `centella.<name>`."""
    import logging  # takes as long as five of our modules, and a message is rare

    return logging.getLogger(f"centella.{name}")
