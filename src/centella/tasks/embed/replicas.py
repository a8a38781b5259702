"""A task on several devices: its replicas, and which of the devices were lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, TypeVar

from centella.errors import ContractError, DeviceLostError
from centella.runtime.pending import Pending
from centella.tasks.embed.forward import Parts, Replicated
from centella.tasks.text.batches import Batch, Progress
from centella.tasks.text.several import Submit, run_on_each, run_on_several

R = TypeVar("R")
T = TypeVar("T", bound=Replicated)


class Replicas(Generic[T]):
    """The same model on further devices.

    Args:
        op: what errors and the log begin with.
        first: an Embedder or a classifier; others: the replicas, copies of what it is now.
    """

    def __init__(self, op: str, first: T, others: tuple[T, ...]) -> None:
        self.others: tuple[T, ...] = others
        self._op = op
        self._copied = Parts(first)
        self._lost: dict[str, DeviceLostError] = {}  # by the name of a device

    def run(
        self, first: T, batches: Iterable[Batch], total: int,
        submit: Callable[[T, Batch], Pending[R]], take: Callable[[Batch, R], None],
        progress: Progress, few: bool,
    ) -> None:  # fmt: skip
        """As `run_on_several`, on the first and the others.

        Raises:
            ContractError: the first was changed since; CentellaError: as `run_on_several`.
        """
        submits = self._submits(first, submit)
        run_on_several(self._op, batches, total, submits, take, progress, self._lost, few)

    def run_on_each(self, first: T, batch: Batch, submit: Callable[[T, Batch], Pending[R]]) -> None:
        """As `several.run_on_each`, on the first and the others; raises as `run`."""
        run_on_each(self._op, batch, self._submits(first, submit), self._lost)

    def _submits(self, first: T, submit: Callable[[T, Batch], Pending[R]]) -> dict[str, Submit[R]]:
        """What starts a batch on each device, by its name."""
        if not self._copied.are_of(first) or self._copied.changed:
            raise ContractError(
                f"{self._op}: expected model, dense and heads as they were when replicas were set, "
                f"got changed ones: change those of each replica too and set replicas again, or "
                f"set it to () for one device"
            )
        starts: dict[str, Submit[R]] = {}
        for where in (first, *self.others):
            where.config = first.config
            name = where.model.device.name
            starts[f"{name} ({len(starts)})" if name in starts else name] = partial(submit, where)
        return starts
