"""Groups of a launch that run together: many by one machine, or those of a cluster by turns."""

from __future__ import annotations

from centella.simulator.atomics import ATOMICS
from centella.simulator.barriers import Barriers
from centella.simulator.bulk import Boxes
from centella.simulator.clusters import Member
from centella.simulator.copies import Copies, Flights
from centella.simulator.fragments import FRAGMENTS
from centella.simulator.group_ops import GROUP_OPS
from centella.simulator.launch import Launch
from centella.simulator.machine import DONE, Capability, Machine
from centella.simulator.memory import MEMORY
from centella.simulator.products import Products
from centella.simulator.race_check import Shadow
from centella.simulator.roles import ROLES
from centella.simulator.tma import Tma

# Statements that tell the hardware something, and compute nothing.
HINTS = ("resident", "fetch_lines", "cluster", "launch_dependents")
STATELESS = (
    MEMORY, GROUP_OPS, ATOMICS, FRAGMENTS,
    Capability(dict.fromkeys(HINTS, lambda machine, index: None)),
)  # fmt: skip


def run_groups(launch: Launch, first: int, count: int) -> None:
    """Run `count` groups from `first` on, as many as run together.

    Raises:
        SimulationError: a fault, or none of the groups gets further.
    """
    machines = _machines(launch, first, count)
    live = [(machine, machine.steps()) for machine in machines]
    while live:
        before = sum(machine.passed for machine in machines)
        waiting = [(machine, rest) for machine, rest in live if next(rest, DONE) is not DONE]
        if len(waiting) == len(live) and before == sum(machine.passed for machine in machines):
            raise live[0][0].stuck()
        live = waiting


def _machines(launch: Launch, first: int, count: int) -> list[Machine]:
    """The machines of these groups, with the capabilities that the kernel needs."""
    if not launch.group_by_group:
        machine = Machine(launch, first, count, Flights if "cp_async" in launch.ops else Shadow)
        machine.use(*STATELESS, Copies().capability())
        return [machine]
    machines: list[Machine] = []
    peers: list[Member] = []
    for group in range(first, first + count):
        machine, barriers = Machine(launch, group, 1, Boxes), Barriers()
        member = Member(machine.memory["shared"], barriers, peers)
        stateful = (Copies(), Products(), Tma(barriers), barriers, member)
        machine.use(*STATELESS, ROLES, *(part.capability() for part in stateful))
        machines.append(machine)
    return machines
