"""`python -m centella`: Ctrl-C ends it without a traceback, also while `centella` is imported.

`python -m` imports the package before `__main__`, so the package imports this first. For the script
`centella_command` does it; `centella.cli.process` has Ctrl-C raise KeyboardInterrupt again.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes a millisecond
import sys

_given = sys.orig_argv
if (
    sys.argv[:1] == ["-m"]  # as long as Python looks for the module
    and "centella" in _given[1:]
    and _given[_given.index("centella") - 1] == "-m"
    and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
):
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
