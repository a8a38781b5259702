"""Roles: warpgroups of a group that run different statements beside each other.

They run by turns, each until it waits; a round in which none gets further ends in a deadlock, which
is reported. So a producer runs as far ahead as its barriers let it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from centella.simulator.group_ops import WARPGROUP
from centella.simulator.machine import DONE, Capability, Machine
from centella.simulator.race_check import Mask


class Strand(NamedTuple):
    """A warpgroup in a role: its threads, what they have computed, what they still have to do."""

    mask: Mask
    values: list[Any]
    rest: Iterator[None]


def _roles(machine: Machine, start: int) -> Iterator[None]:
    """Run the roles from `start` on beside each other; yields where all of them wait."""
    outer, own, body = machine.active, machine.values, machine.ir.body
    strands = _strands(machine, start)
    live = strands
    while live:
        before, waiting = machine.passed, []
        for strand in live:
            machine.narrow(strand.mask)
            machine.values = strand.values
            if next(strand.rest, DONE) is not DONE:
                waiting.append(strand)
        if len(waiting) == len(live) and machine.passed == before:
            yield
        live = waiting
    machine.values = own
    for n, (op, *_) in enumerate(body[:start]):
        if op in ("var", "fragment"):
            for strand in strands:
                own[n] = np.where(strand.mask, strand.values[n], own[n])
    machine.narrow(outer)


def _strands(machine: Machine, start: int) -> list[Strand]:
    """The warpgroups of the roles from `start` on, behind what is computed between roles."""
    plain, values, body = machine.launch.plain, machine.values, machine.ir.body
    beside, _ = machine.beside(start)
    for n in beside:
        op, _, args, _ = body[n]
        if op in plain:
            values[n] = plain[op](*[values[a] for a in args])
    return [
        Strand(mask, list(values), machine.run(index + 1, machine.launch.ends[index]))
        for index in beside
        if body[index][0] == "if"
        for mask in _warpgroups(machine, machine.active & values[body[index][2][0]])
    ]


def _warpgroups(machine: Machine, mask: Mask) -> Iterator[Mask]:
    """The threads of each warpgroup that are in `mask`, where there are any."""
    number = np.arange(machine.ir.workgroup)[None] // WARPGROUP
    for group in np.unique(number):
        threads = mask & (number == group)
        if threads.any():
            yield threads


ROLES = Capability({}, {"role": _roles})
