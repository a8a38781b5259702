"""An Embedder on several devices: its replicas, and which of the devices were lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from centella.dtypes import Array
from centella.errors import ContractError, DeviceLostError
from centella.runtime.pending import Pending
from centella.tasks.batches import Batch, Progress
from centella.tasks.forward import Parts
from centella.tasks.several import Submit, run_on_each, run_on_several

if TYPE_CHECKING:
    from centella.tasks.embed import Embedder

Outputs = dict[str, Array]


class Replicas:
    """The same model on further devices.

    Args:
        first: the Embedder; others: the replicas, copies of what it is now.
    """

    def __init__(self, first: Embedder, others: tuple[Embedder, ...]) -> None:
        self.others: tuple[Embedder, ...] = others
        self._copied = Parts(first)
        self._lost: dict[str, DeviceLostError] = {}  # by the name of a device

    def run(
        self, first: Embedder, batches: Iterable[Batch], total: int,
        submit: Callable[[Embedder, Batch], Pending[Outputs]],
        take: Callable[[Batch, Outputs], None], progress: Progress, few: bool,
    ) -> None:  # fmt: skip
        """As `run_on_several`, on the first and the others.

        Raises:
            ContractError: the first was changed since; CentellaError: as `run_on_several`.
        """
        submits = self._submits(first, submit)
        run_on_several(batches, total, submits, take, progress, self._lost, few)

    def run_on_each(
        self, first: Embedder, batch: Batch, submit: Callable[[Embedder, Batch], Pending[Outputs]]
    ) -> None:
        """As `several.run_on_each`, on the first and the others; raises as `run`."""
        run_on_each(batch, self._submits(first, submit), self._lost)

    def _submits(
        self, first: Embedder, submit: Callable[[Embedder, Batch], Pending[Outputs]]
    ) -> dict[str, Submit[Outputs]]:
        """What starts a batch on each device, by its name."""
        if not self._copied.are_of(first):
            raise ContractError(
                "encode: expected model, dense and heads as they were when replicas were set, got "
                "changed ones: change those of each replica too and set replicas again, or set it "
                "to () for one device"
            )
        starts: dict[str, Submit[Outputs]] = {}
        for where in (first, *self.others):
            where.config = first.config
            name = where.model.device.name
            starts[f"{name} ({len(starts)})" if name in starts else name] = partial(submit, where)
        return starts
