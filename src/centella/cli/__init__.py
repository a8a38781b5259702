"""The command line: `centella info`, `embed`, `kernels`, `bench`, `demo`.

Each subcommand calls library functions and prints. It needs the extra `cli` (typer and rich).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from centella.cli.process import run
from centella.errors import MissingExtraError


def main() -> None:
    """Run the command line; the entry point of the `centella` script."""
    for package in ("typer", "rich"):
        if find_spec(package) is None:
            print(f"centella: {MissingExtraError(package, 'cli')}", file=sys.stderr)
            sys.exit(1)
    sys.exit(run(_command))


def _command() -> None:
    from centella.cli.app import build  # where Ctrl-C is handled already

    build()(prog_name="centella")
