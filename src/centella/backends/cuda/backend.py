"""Programs and submissions of one CUDA device.

All work of a device runs in submission order, whatever streams it goes to. A launch passes one
parameter struct (addresses, number of groups, scalars), so that its host cost does not grow with
the arguments.
"""

from __future__ import annotations

import struct
from collections import deque
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from centella.backends.base import About, Launch, Submission, packed
from centella.backends.cuda.driver import check, driver, explain, load
from centella.backends.cuda.graph import Graph
from centella.backends.cuda.maps import TensorMaps
from centella.backends.cuda.memory import CudaMemory, host_address
from centella.backends.cuda.stamps import Stamps
from centella.backends.cuda.ticket import CudaTicket
from centella.backends.cuda.words import bring, few, program_on
from centella.emit.program import HostProgram, Program
from centella.emit.ptx import entry_name, overlaps, shared_layout
from centella.errors import CompileError, DeviceError, LimitError, OutOfMemoryError
from centella.ledger.counts import began, count, noted

LOG_BYTES = 16384
CAPTURES_OVERLAPS = 12030  # the first driver whose graphs keep them


class Pipeline(NamedTuple):
    """A function of the driver's, and how it is launched.

    Attributes:
        most: blocks of a launch at most, which take its groups in turn; 0: one for each group.
        meets: its blocks wait for each other, so that all of them begin, or none.
    """

    function: Any
    threads: int
    dynamic: int
    most: int
    meets: bool


class CudaBackend(CudaMemory):
    """One CUDA device: its programs and submissions."""

    def __init__(self, which: str = "", *, native: Any = None) -> None:
        super().__init__(which, native=native)
        self._modules: list[Any] = []
        self._maps = TensorMaps()
        self._dead_graphs: deque[Any] = deque()
        self._stamps: Stamps | None = None  # of the last submission that was timed
        self._dead_stamps: deque[list[Any]] = deque()
        driver_version = int(check(driver.cuDriverGetVersion()))
        self._overlaps = overlaps(self.caps.arch) and driver_version >= CAPTURES_OVERLAPS
        try:  # loaded before there is work, which a driver may wait for
            self._copier: Any = self.compile(program_on(self.caps)).function
            with self.current():
                load(self._copier)
        except BaseException:
            self.close()
            raise

    # -- programs ---------------------------------------------------------------------------------

    def compile(self, program: Program | HostProgram) -> Any:
        """The driver's form of a program."""
        assert isinstance(program, Program)
        log = bytes(LOG_BYTES)
        option = driver.CUjit_option
        dynamic = shared_layout(program.ir).dynamic
        with self.current():
            status, module = driver.cuModuleLoadDataEx(
                program.source.encode() + b"\0",
                2,
                [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES],
                [log, LOG_BYTES],
            )
            if status != driver.CUresult.CUDA_SUCCESS:
                text = log.split(b"\0")[0].decode(errors="replace") or explain(status)
                raise CompileError(program.name, program.source, text)
            self._modules.append(module)
            function = check(driver.cuModuleGetFunction(module, entry_name(program.ir).encode()))
            if dynamic:
                check(driver.cuFuncSetAttribute(
                    function,
                    driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    dynamic,
                ))  # fmt: skip
            if program.ir.early:  # beside groups that have most of a multiprocessor's memory
                check(driver.cuFuncSetAttribute(
                    function,
                    driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                    100,
                ))  # fmt: skip
            most = self._most_blocks(function, program, dynamic) if program.ir.resident else 0
        return Pipeline(function, program.ir.workgroup, dynamic, most, program.ir.meets)

    def _most_blocks(self, function: Any, program: Program, dynamic: int) -> int:
        """Blocks of a kernel that the device holds at a time: whole clusters."""
        if program.ir.cluster > 1:  # whose size is the function's own
            config = driver.CUlaunchConfig()
            config.gridDimX, config.blockDimX = program.ir.cluster, program.ir.workgroup
            config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
            config.sharedMemBytes = dynamic
            clusters = check(driver.cuOccupancyMaxActiveClusters(function, config))
            return program.ir.cluster * int(clusters)
        return self.processors * int(check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            function, program.ir.workgroup, dynamic
        )))  # fmt: skip

    def admit(self, launch: Launch) -> None:
        """Refuse more groups that meet than the device holds at a time."""
        pipeline: Pipeline = launch.pipeline
        if pipeline.meets and launch.groups > pipeline.most:
            raise LimitError(
                f"kernel {launch.program.name!r}: expected at most {pipeline.most:,} groups, which "
                f"is what {self.name} holds at a time, as they wait for each other "
                f"(ptx.grid_barrier), got {launch.groups:,}"
            )

    # -- submission -------------------------------------------------------------------------------

    def warm(self, work: Submission) -> None:
        """Load the functions that the driver leaves to their first launch."""
        with self._lock, self.current():
            for bound in work.launches:
                begin = began()
                if load(bound.pipeline.function):
                    noted("compile", begin, kernel=bound.program.name)

    def submit(self, work: Submission) -> CudaTicket:
        """Start a submission."""
        again: Graph | None = None if work.timed and work.launches else work.prepared
        back = [read.nbytes for read in work.reads]
        # Pinned memory is free again once somebody has waited, as for read-backs they do.
        quick = bool(back) and again is not None
        there = [data.nbytes if quick and few(data.nbytes) else 0 for _, data in work.uploads]
        places, end = packed(back + there)
        reads, uploads = places[: len(back)], places[len(back) :]
        with self._lock, self.current():
            # What may find no memory comes before anything is on the stream.
            ticket = CudaTicket(self, self._take_event(), reads)
            pinned = ticket.pinned = self._take_pinned(end) if end else None
            if work.timed and work.launches:
                ticket.stamps = self._new_stamps(len(work.launches))
            stamps = ticket.stamps
            stream = self._streams.turn().native
            for (slot, data), (at, nbytes) in zip(work.uploads, uploads, strict=True):
                if not nbytes or pinned is None:
                    self._send(work.slots[slot], data, stream)
                    continue
                pinned.data[at : at + nbytes] = data.reshape(-1).view(np.uint8)
                target = work.slots[slot].native
                bring(self._copier, pinned.address + at, target, nbytes, stream)
            for copy in work.copies:
                check(driver.cuMemcpyDtoDAsync(
                    work.slots[copy.target].native + copy.start,
                    work.slots[copy.source].native + copy.first,
                    copy.nbytes, stream))  # fmt: skip
            if again is not None:
                again.launch(stream)
            try:
                if work.launches and again is None:
                    self._launch(work, stream, stamps)
                for read, (at, nbytes) in zip(work.reads, reads, strict=True):
                    assert pinned is not None
                    source = work.slots[read.slot].native + read.start
                    if again is None or not few(nbytes):
                        check(driver.cuMemcpyDtoHAsync(
                            pinned.address + at, source, nbytes, stream
                        ))  # fmt: skip
                    else:
                        bring(self._copier, source, pinned.address + at, nbytes, stream)
                check(driver.cuEventRecord(ticket.event, stream))
            except OutOfMemoryError as error:  # too late to try again: the launches are under way
                raise DeviceError(f"{self.name}: {error}") from error
        return ticket

    def prepare(self, work: Submission) -> Graph:
        """A graph of the launches, each begun before the last is quite over, where it may."""
        own = self._streams.own.native  # another may not be captured, or be captured already
        with self._lock, self.current():
            while self._dead_graphs:
                driver.cuGraphExecDestroy(self._dead_graphs.popleft())
            return Graph(
                own,
                partial(self._launch, work, own, None, self._overlaps),
                self._dead_graphs.append,
            )

    def _new_stamps(self, launches: int) -> Stamps:
        while self._dead_stamps:
            for event in self._dead_stamps.popleft():
                driver.cuEventDestroy(event)
        self._stamps = Stamps(launches, self._stamps, self._dead_stamps.append)
        return self._stamps

    def _launch(
        self, work: Submission, stream: Any, stamps: Stamps | None = None, overlap: bool = False
    ) -> None:
        address_of = [buffer.native for buffer in work.slots].__getitem__
        structs = bytearray()
        places: list[int] = []
        for bound in work.launches:
            places.append(len(structs))
            if bound.program.ir.maps:  # type: ignore[union-attr]  # not of the host
                structs += self._maps.of(bound, address_of)
            structs += _addresses(len(bound.slots)).pack(*map(address_of, bound.slots))
            structs += bound.parameters
            structs += bytes(-len(structs) % 8)
        # The driver copies each struct while it takes the launch.
        blob = np.frombuffer(structs, np.uint8)
        pointers = np.array(places, np.uint64) + np.uint64(host_address(blob))
        first = host_address(pointers)
        alone = partial(_configured, _overlap()) if overlap else driver.cuLaunchKernel
        some_meet = any([bound.pipeline.meets for bound in work.launches])
        together = partial(_configured, _together()) if some_meet else alone
        ok = driver.CUresult.CUDA_SUCCESS
        behind = ordered(work) if overlap else frozenset()
        for position, bound in enumerate(work.launches):
            function, threads, dynamic, most, meets = bound.pipeline
            if stamps is not None:
                stamps.record(2 * position, stream)
            how = together if meets else driver.cuLaunchKernel if position in behind else alone
            status = how(
                function, min(bound.groups, most or bound.groups), 1, 1, threads, 1, 1, dynamic,
                stream,
                first + 8 * position, 0,
            )[0]  # fmt: skip
            if status != ok:
                raise DeviceError(f"{bound.program.name}: {explain(status)}")
            if stamps is not None:
                stamps.record(2 * position + 1, stream)
        count(parameter_bytes=blob.nbytes)

    def describe(self) -> About:
        """Name, driver and limits."""
        name = check(driver.cuDeviceGetName(256, self._device))
        free, total = self.memory()
        return {
            "device": "cuda",
            "name": name.split(b"\0")[0].decode(),
            "driver": int(check(driver.cuDriverGetVersion())),
            "arch": self.caps.arch,
            "processors": self.processors,
            "memory_total": total,
            "memory_free": free,
            "max_shared": self.caps.max_shared,
        }

    def after_fork(self, *, child: bool) -> bool:
        """A child has no driver: none survives a fork."""
        return not child

    def close(self) -> None:
        """Release what this backend made; the primary context may live on in other libraries."""
        under_way = (*self._sent, *self._unread)
        sent, events = zip(*under_way, strict=True) if under_way else ((), ())
        pinned = (*sent, *self._idle_pinned, *(p for free in self._pinned.values() for p in free))
        with self._lock, self.current():
            check(driver.cuStreamSynchronize(self._streams.turn().native))
            for graph in self._dead_graphs:
                driver.cuGraphExecDestroy(graph)
            self._stamps = None
            for event in (*events, *self._events, *(e for one in self._dead_stamps for e in one)):
                driver.cuEventDestroy(event)
            for memory in pinned:
                driver.cuMemFreeHost(memory.address)
            for module in self._modules:
                driver.cuModuleUnload(module)
            self._streams.close()
        self._closed = True
        self._events, self._pinned, self._modules = [], {}, []
        self._idle_pinned.clear()
        self._sent.clear()
        self._unread.clear()
        if self._primary:
            driver.cuDevicePrimaryCtxRelease(self._device)


def ordered(work: Submission) -> frozenset[int]:
    """Launches that read, before they wait, what one before them in the submission writes.

    They begin when those before are over; what these wrote is then there for all that follow.
    """
    # Parts of a buffer have its address. What launches write is of the pool, whose allocations do
    # not overlap: imported memory, which may, is only read.
    written: set[int] = set()
    behind = set()
    for position, bound in enumerate(work.launches):
        ir = bound.program.ir  # type: ignore[union-attr]  # not of the host
        addresses = [work.slots[slot].native for slot in bound.slots]
        if any(addresses[argument] in written for argument in ir.early):
            behind.add(position)
            written.clear()
        written.update(a for a, arg in zip(addresses, ir.args, strict=True) if arg.writable)
    return frozenset(behind)


@cache
def _addresses(number: int) -> struct.Struct:
    """So many addresses as they lie in a launch's parameters."""
    return struct.Struct(f"<{number}Q")


def _overlap() -> Any:
    """A launch's configuration that lets it begin before what the stream had last has ended."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return _configuration(attribute)


def _together() -> Any:
    """A launch's configuration that lets all of its blocks begin together, or none."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    attribute.value.cooperative = 1
    return _configuration(attribute)


def _configuration(attribute: Any) -> Any:
    config = driver.CUlaunchConfig()
    config.attrs, config.numAttrs = [attribute], 1
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    return config


def _configured(config: Any, function: Any, *launch: Any) -> Any:
    """`cuLaunchKernel` with this configuration."""
    config.gridDimX, _, _, config.blockDimX, _, _, config.sharedMemBytes, stream, *rest = launch
    config.hStream = stream
    return driver.cuLaunchKernelEx(config, function, *rest)
