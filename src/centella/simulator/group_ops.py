"""The simulator's machine with what the threads of a group do together, on any target."""

from __future__ import annotations

from typing import Any

import numpy as np

from centella.lang.arithmetic import REDUCE
from centella.simulator.atomics import AtomicMachine
from centella.simulator.race_check import Ids


class GroupMachine(AtomicMachine):
    """One launch, of a portable kernel."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.effects.update(dict.fromkeys(REDUCE, self._reduce))
        self.effects.update(
            barrier=self._meet, shuffle_xor=self._shuffle, workgroup_uniform=self._broadcast
        )

    def _meet(self, index: int) -> None:
        """All threads of a group come here or none; a barrier orders what stands around it."""
        if not self.check:
            return
        op, size = self.ir.body[index][0], self.ir.workgroup
        here = np.broadcast_to(self.active, self.shape).sum(axis=1, keepdims=True)
        split = (here > 0) & (here < size)
        if split.any():
            _, thread = self._first(self.active & split)
            count = int(here[split][0])
            raise self._fault(index, thread, f"{op} reached by {count} of {size} threads")
        if op in ("barrier", "workgroup_uniform"):
            self.epoch: Ids = self.epoch + (here > 0)

    def _broadcast(self, index: int) -> None:
        self._meet(index)
        x = self.values[self.ir.body[index][2][0]]
        self.values[index] = x[:, :1] if x.ndim else x

    def _reduce(self, index: int) -> None:
        self._meet(index)
        op, _, args, _ = self.ir.body[index]
        ufunc, identity = REDUCE[op]
        x = np.broadcast_to(self.values[args[0]], self.shape)
        missing = ((0, 0), (0, -self.ir.workgroup % self.subgroup))
        lanes = np.pad(x, missing, constant_values=identity(x.dtype))
        lanes = lanes.reshape(self.shape[0], -1, self.subgroup)
        result = ufunc.reduce(lanes, axis=2, dtype=x.dtype)
        self.values[index] = result.repeat(self.subgroup, axis=1)[:, : self.ir.workgroup]

    def _shuffle(self, index: int) -> None:
        self._meet(index)
        _, _, args, mask = self.ir.body[index]
        threads = np.arange(self.ir.workgroup)
        lane = (threads % self.subgroup) ^ mask
        partner = threads - threads % self.subgroup + lane
        outside = (lane >= self.subgroup) | (partner >= self.ir.workgroup)
        if outside.any():
            _, thread = self._first(self.active & outside)
            text = f"shuffle_xor by {mask} leaves the subgroup of {self.subgroup} lanes"
            raise self._fault(index, thread, text)
        self.values[index] = np.broadcast_to(self.values[args[0]], self.shape)[:, partner]
