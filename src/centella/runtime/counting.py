"""What a submission adds to the ledger, and to the timed scopes."""

from __future__ import annotations

from centella.backends.base import Backend, Submission, Ticket
from centella.ledger.call_sites import line_of
from centella.ledger.counts import count, noted, noted_work
from centella.ledger.timeline import TimedLaunch, Work
from centella.runtime.prepare import Executable


def count_work(work: Submission, *, peek: bool = False) -> None:
    """Count what was handed over.

    Args:
        peek: its read-backs are for debugging.
    """
    amounts: dict[str, int] = {}
    if work.uploads:
        amounts.update(uploads=len(work.uploads), upload_bytes=_bytes_up(work))
    if work.copies:
        amounts.update(copies=len(work.copies), copy_bytes=sum(c.nbytes for c in work.copies))
    if work.launches or work.copies:
        amounts.update(submissions=1, launches=len(work.launches))
    if work.reads and peek:
        amounts.update(peeks=len(work.reads), peek_bytes=_bytes_back(work))
    elif work.reads:
        amounts.update(downloads=1, download_bytes=_bytes_back(work))
    if amounts:
        count(**amounts)


def note_work(
    backend: Backend, work: Submission, ticket: Ticket, begin: int, executable: Executable,
    *, peek: bool = False,
) -> None:  # fmt: skip
    """Note in the timed scopes what was handed over, and ask for the times of its launches.

    Args:
        backend: ran it; begin: when, in ns, unless the work says.
        executable: whose submission it is.
    """
    begin = work.begun or begin
    if work.reads:
        name = "peek" if peek else "download"
        noted(name, begin, backend.name, bytes=_bytes_back(work))
    if work.uploads:
        noted("upload", begin, backend.name, bytes=_bytes_up(work))
    noted("submit", begin, launches=len(work.launches), copies=len(work.copies))
    plan = executable.plan
    if plan is None or not work.launches:
        return
    launches = tuple(
        TimedLaunch(
            each.program.name, plan.label(each.node), line_of(executable.call_sites[each.node])
        )
        for each in work.launches
    )
    clock = backend.clock
    waiting = ticket if not clock.missing else None
    noted_work(Work(backend.name, begin, launches, waiting, clock.missing, clock.host))


def _bytes_up(work: Submission) -> int:
    return sum([data.nbytes for _, data in work.uploads])


def _bytes_back(work: Submission) -> int:
    return sum([read.nbytes for read in work.reads])
