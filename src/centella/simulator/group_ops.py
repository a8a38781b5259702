"""What the threads of a group do together, on any target."""

from __future__ import annotations

import numpy as np

from centella.lang.arithmetic import REDUCE
from centella.lang.ir import SUBGROUP
from centella.simulator.machine import Capability, Machine, over
from centella.simulator.race_check import Buffer

WARP = 32
WARPGROUP = 128
OF_WARPS = SUBGROUP | {"ldmatrix", "stmatrix", "mma"}  # in a role, too


def meet(machine: Machine, index: int) -> None:
    """All threads of a group come here or none; a barrier orders what stands around it.

    What warps do asks for no more than whole warpgroups where those work by themselves.
    """
    op, size = machine.ir.body[index][0], machine.ir.workgroup
    roles = size % WARPGROUP == 0 or "role" in machine.ir.ops
    if machine.launch.group_by_group and roles and op in OF_WARPS:
        warpgroups(machine, index)
        return
    if not machine.check:
        return
    here = machine.here.sum(axis=1, keepdims=True)
    split = (here > 0) & (here < size)
    if split.any():
        _, thread = machine.first_of(machine.active & split)
        count = int(here[split][0])
        raise machine.fault(index, thread, f"{op} reached by {count} of {size} threads")
    if op in ("barrier", "workgroup_uniform"):
        machine.epoch = machine.epoch + (here > 0)


def warpgroups(machine: Machine, index: int) -> list[int]:
    """The warpgroups that are here, each with all its threads; warps past the last are in none."""
    if machine.full and machine.here.size % WARPGROUP == 0:
        return list(range(machine.here.size // WARPGROUP))
    firsts = np.arange(0, machine.here.size, WARPGROUP)
    here = np.add.reduceat(machine.here.reshape(-1), firsts, dtype=np.int64)
    split = (here > 0) & (here < WARPGROUP)
    if split.any():
        text = f"reached by {here[split][0]} of {WARPGROUP} threads"
        raise machine.fault_here(index, f"{machine.ir.body[index][0]} {text}")
    return [int(g) for g in np.flatnonzero(here)]


def _broadcast(machine: Machine, index: int) -> None:
    meet(machine, index)
    x = machine.values[machine.ir.body[index][2][0]]
    machine.values[index] = x[:, :1] if x.ndim else x


def _reduce(machine: Machine, index: int) -> None:
    meet(machine, index)
    op, _, args, _ = machine.ir.body[index]
    ufunc, identity = REDUCE[op]
    (groups, workgroup), subgroup = machine.shape, machine.launch.subgroup
    x = over(machine.values[args[0]], machine.shape)
    missing = ((0, 0), (0, -workgroup % subgroup))
    lanes = np.pad(x, missing, constant_values=identity(x.dtype))
    lanes = lanes.reshape(groups, -1, subgroup)
    result = ufunc.reduce(lanes, axis=2, dtype=x.dtype)
    machine.values[index] = result.repeat(subgroup, axis=1)[:, :workgroup]


def _shuffle(machine: Machine, index: int) -> None:
    meet(machine, index)
    _, _, args, mask = machine.ir.body[index]
    workgroup, subgroup = machine.ir.workgroup, machine.launch.subgroup
    threads = np.arange(workgroup)
    lane = (threads % subgroup) ^ mask
    partner = threads - threads % subgroup + lane
    outside = (lane >= subgroup) | (partner >= workgroup)
    if outside.any():
        _, thread = machine.first_of(machine.active & outside)
        text = f"shuffle_xor by {mask} leaves the subgroup of {subgroup} lanes"
        raise machine.fault(index, thread, text)
    machine.values[index] = over(machine.values[args[0]], machine.shape)[:, partner]


def _meet_all(machine: Machine, index: int) -> None:
    """All threads of all groups that run come here."""
    everywhere = machine.here
    if machine.check and not everywhere.all():
        _, thread = machine.first_of(machine.active)
        text = f"grid_barrier reached by {int(everywhere.sum())} of {everywhere.size} threads"
        raise machine.fault(index, thread, text)
    machine.epoch = machine.epoch + 1
    for region in machine.memory["global"]:
        if isinstance(region.race_check, Buffer):
            region.race_check.meet()


GROUP_OPS = Capability(
    dict.fromkeys(REDUCE, _reduce)
    | {
        "barrier": meet,
        "grid_barrier": _meet_all,
        "shuffle_xor": _shuffle,
        "workgroup_uniform": _broadcast,
    }
)
