"""The `centella` script: Ctrl-C ends it without a traceback, also while `centella` is imported.

It stands beside the package, whose import would come first. `centella.cli.process` has Ctrl-C raise
KeyboardInterrupt again as soon as that is handled.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes a millisecond

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def main() -> None:
    """Run the command line."""
    from centella.cli import main

    main()
