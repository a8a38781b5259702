"""The plans of a device, with their launches compiled: each structure is planned once."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from itertools import count as counter
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from centella.backends.base import Backend, Launch, Load
from centella.emit.program import HostProgram, Program
from centella.errors import CentellaError
from centella.ledger.counts import began, count, noted
from centella.plan import build as plan
from centella.plan.plan import Plan
from centella.record.recording import Recorded
from centella.record.values import Value
from centella.runtime.bind_window import narrowed
from centella.runtime.pipelines import PipelineCache

PLANS = 512


class Planned(Struct, eq=False):
    """A plan with the pipelines of one cache, as it was then.

    Attributes:
        launches: the plan's, with their pipelines and those windows that users' kernels need.
        again: what the backend keeps for the next run of the launches.
        compiled: how many of the launches run a program that a driver compiled.
        narrowed: some are a user's kernels, with windows.
        loads, total: what each launch asks of the device, and all of them.
        reports: a program of its launches counts the loops that the driver stopped.
    """

    plan: Plan
    launches: list[Launch]
    again: dict[Any, Any] = field(default_factory=dict)
    compiled: int = 0
    narrowed: bool = False
    cache: PipelineCache | None = None
    generation: int = 0
    loads: Sequence[Load] = ()
    total: Load = Load()
    reports: bool = False


def loads_of(planned: Plan) -> list[Load]:
    """What each launch asks of a device: all that it sees once, and its share of the arithmetic."""
    flops: dict[int, float] = {}
    for node, launches in Counter(launch.node for launch in planned.launches).items():
        form = planned.nodes[node].form
        count = form.op.flops
        if count is not None:
            flops[node] = count(form) / launches
    return [
        Load(flops.get(launch.node, 0), sum(spec.storage_bytes for spec, _ in launch.views))
        for launch in planned.launches
    ]


class Plans:
    """The plans of one backend, the most recently used."""

    _ids = counter(1)

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._id = next(Plans._ids)
        self._planned: OrderedDict[Any, Planned] = OrderedDict()
        self._memo = plan.Memo()

    def __len__(self) -> int:
        return len(self._planned)

    def find(self, taken: Recorded, slots: Mapping[Value, int], wanted: plan.Wanted) -> Planned:
        """The plan of a recording, built unless it is known; its launches may not be compiled yet.

        Args:
            slots: of each outside value.
            wanted: for each node, which of its values must outlive the plan.
        """
        key = plan.key_of(taken.nodes, slots, wanted)
        known = self._planned.get(key)
        if known is not None:
            self._planned.move_to_end(key)
            return known
        begin = began()
        built = plan.build(taken.nodes, slots, wanted, self._backend.caps, self._memo)
        count(plans=1)
        noted("plan", begin, operations=len(taken.nodes), launches=len(built.launches))
        planned = self._planned[key] = Planned(built, [])
        planned.loads = loads_of(built)
        planned.total = Load(
            sum(x.flops for x in planned.loads), sum(x.nbytes for x in planned.loads)
        )
        programs = [launch.program for launch in built.launches]
        planned.reports = any(isinstance(p, Program) and p.reports for p in programs)
        if len(self._planned) > PLANS:
            self._planned.popitem(last=False)
        return planned

    def compiled(
        self, taken: Recorded, slots: Mapping[Value, int], wanted: plan.Wanted,
        cache: PipelineCache,
    ) -> Planned:  # fmt: skip
        """The plan of a recording with its launches compiled; arguments as for `find`."""
        planned = self.find(taken, slots, wanted)
        if planned.cache is cache and planned.generation == cache.generation:
            cache.hit(planned.compiled)
            return planned
        generation = cache.generation
        launches: list[Launch] = []
        for launch in planned.plan.launches:
            try:
                pipeline = self._pipeline(launch.program, cache)
                compiled = replace(launch, pipeline=pipeline)
                self._backend.admit(compiled)
                launches.append(narrowed(compiled, self._backend.caps))
            except CentellaError as error:
                taken.nodes[launch.node].refuse(error)
                raise
        planned.launches, planned.cache, planned.generation = launches, cache, generation
        planned.again = {}
        planned.compiled = sum(isinstance(launch.program, Program) for launch in launches)
        planned.narrowed = any(launch.windows for launch in launches)
        return planned

    def _pipeline(self, program: Program | HostProgram, cache: PipelineCache) -> Any:
        if isinstance(program, HostProgram):
            return program
        return cache.get(
            self._id, program.key, program.name, lambda: self._backend.compile(program)
        ).native
