"""The process around a command: its streams, its signals and its exit status.

A stream may be closed, full, or a pipe whose reader has left. Then the status says so, and one line
where there is a place for it.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from centella.cli.output import STDOUT, err, show_cursor
from centella.host.interrupts import raise_later

SIGNALLED = 128  # a shell adds the number of the signal that ended a program
READER_LEFT = SIGNALLED + 13  # SIGPIPE
INTERRUPTED = SIGNALLED + int(signal.SIGINT)


def run(command: Callable[[], Any]) -> int:
    """Call a command; returns the exit status of the process."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is who handles what it raises
    _open_streams()
    _end_by_exception("SIGTERM", "SIGHUP")
    own = sys.stdout, sys.stderr
    try:
        status = _status(command, handler)
    except KeyboardInterrupt:  # a second one, while the first was handled
        status = INTERRUPTED
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Python would print a traceback of what it does at its end, such as waiting for threads.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout, sys.stderr = own  # a bar that a signal cut off has put its own there
    try:
        sys.stdout.flush()
    except OSError as error:
        status = status or failed_output(error)  # a command that failed has said why
    if status > SIGNALLED and "rich.progress" in sys.modules and sys.stderr.isatty():
        show_cursor()  # a bar that had only begun has left it hidden
    _forget_output()
    return status


def failed_output(error: OSError) -> int:
    """The exit status where standard output takes no more; says why, but for a reader that left."""
    if isinstance(error, BrokenPipeError):
        return READER_LEFT
    err(f"centella: {STDOUT}: {reason(error)}")
    return 1


def reason(error: OSError) -> str:
    """Why the system refused, as it stands behind a name in a line."""
    why = error.strerror or str(error)
    return f"{why[:1].lower()}{why[1:]}"


def _status(command: Callable[[], Any], handler: Any) -> int:
    """The exit status; Ctrl-C is handled as before, or raises where it ended the process."""
    try:
        default = handler in (None, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler if default else handler)
        command()
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        err(str(left.code))
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.errno and error.filename in (None, STDOUT):
            return failed_output(error)
        err(traceback.format_exc().rstrip("\n"))
        return 1
    return 0


def _open_streams() -> None:
    """Give a closed stream a file: what is opened next would get its number, and be written to.

    Standard input and output get one that refuses, so that their use is an error; what is written
    to standard error is lost.
    """
    for name, flags, mode in (
        ("stdin", os.O_WRONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        stream = getattr(sys, name)
        if stream is None:
            opened = os.open(os.devnull, flags)
            stream = open(opened, mode, encoding="utf-8")  # noqa: SIM115 # until the process ends
            setattr(sys, name, stream)
        if mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _end_by_exception(*names: str) -> None:
    """Have signals raise SystemExit: cursors come back, and temporary files go."""

    def leave(number: int, frame: Any) -> None:
        if not raise_later(number, frame):
            raise SystemExit(SIGNALLED + number)

    for name in names:
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, leave)


def _forget_output() -> None:
    """Keep the interpreter from writing, at its end, what could not be written before."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
