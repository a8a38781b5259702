"""A conversation on a terminal, or through pipes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from centella.cli.answers import How, answered, report
from centella.cli.output import STDIN, STDOUT, err, out_json
from centella.errors import CentellaError, DeviceLostError
from centella.ledger.counts import ledger
from centella.tasks.generate.generator import Generator

ASK = "> "
RESET, LEAVE, HELP = "/reset", "/exit", "/help"
COMMANDS = f"{RESET} begins anew, {LEAVE} or Ctrl-D leaves"
ABOUT = f"chat: Ctrl-C stops an answer, {COMMANDS}"


class Talk:
    """A conversation; Ctrl-C ends the answer, and twice at the prompt the chat.

    Raises:
        CentellaError: a model without a chat template; DeviceLostError: its device is gone.
    """

    def __init__(
        self, generator: Generator, first: list[dict[str, str]], how: How,
        template: Mapping[str, Any],
    ) -> None:  # fmt: skip
        if generator.template is None:
            raise CentellaError("generate: --chat: expected a model with a chat template, got none")
        self._generator, self._how = generator, how
        self._first = first
        self._template = template
        self._messages = list(first)

    def run(self) -> None:
        """Ask and answer until the input ends; what fails ends its turn alone."""
        with suppress(ImportError):
            import readline  # noqa: F401  # lines are edited, and come back with the arrow
        if not self._how.as_json:
            err(ABOUT)
        for said in self._lines():
            if said == RESET:
                self._messages = list(self._first)
                continue
            if said == HELP:
                err(ABOUT)
                continue
            if re.fullmatch(r"/\w+", said):
                err(f"chat: no command {said}: {COMMANDS}")
                continue
            before = list(self._messages)
            try:
                self._turn(said)
            except DeviceLostError:  # no turn would do better
                raise
            except CentellaError as error:
                self._messages = before
                self._failed(error)
            except KeyboardInterrupt:  # before the answer began
                self._messages = before

    def _turn(self, said: str) -> None:
        self._messages.append({"role": "user", "content": said})
        row = self._generator.encode_chat(self._messages, **self._template)
        with ledger() as led:
            done = answered(self._generator, row, self._how)
        report(self._generator, done, self._how, led if self._how.show_ledger else None)
        answer = done.all[0]
        self._messages.append({"role": "assistant", "content": answer.text or ""})
        if answer.finish == "context" and not self._how.as_json:
            context = self._generator.context
            err(
                f"chat: the context of {context:,} tokens is full: the answer ends here; {COMMANDS}"
            )

    def _failed(self, error: CentellaError) -> None:
        why = str(error).partition("\n")[0].removeprefix("stream: ").removeprefix("chat: ")
        if "context of the model" in why and len(self._messages) > len(self._first):
            why += " with the messages before it"
        if self._how.as_json:
            out_json({"error": why}, indent=None)
        else:
            err(f"chat: {why}; this message is dropped, {COMMANDS}")

    def _lines(self) -> Iterator[str]:
        """What the user says, until the end."""
        interrupted = False
        while True:
            try:
                said = _line().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if interrupted:
                    return
                interrupted = True
                err(f"\nchat: Ctrl-C once more leaves; {COMMANDS}")
                continue
            interrupted = False
            if said == LEAVE:
                return
            if said:
                yield said


def _line() -> str:
    """The next line of standard input, which a terminal is asked for.

    Raises:
        EOFError: there is none; OSError: a stream that is closed or full, by its name.
    """
    asks = sys.stdin.isatty()
    try:
        line = input(ASK) if asks else sys.stdin.readline()
    except OSError as error:
        error.filename = error.filename or (STDOUT if asks else STDIN)
        raise
    if not (line or asks):
        raise EOFError
    return line
