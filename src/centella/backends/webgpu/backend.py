"""Memory, programs and submissions of one wgpu device.

One submission is one compute pass and one `queue.submit`, unless it is expected to keep the adapter
so long that it is cut (`pace.py`). Launch parameters lie in one uniform buffer, 256 bytes a launch,
bound with dynamic offsets; those of a plan on its buffers are written once. Writes are ordered with
submissions by the queue, so a slot is reused at once. Bind groups are cached by layout and buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import numpy as np
import wgpu

from centella.backends.base import About, Array, Backend, Buffer, Clock, Launch, Submission, packed
from centella.backends.webgpu import arithmetic, functions, loops, raw, subgroups
from centella.backends.webgpu.adapter import (
    TIMER,
    check_native,
    family_of,
    find_adapter,
    is_software,
    open_device,
)
from centella.backends.webgpu.cooperative import offered
from centella.backends.webgpu.groups import Groups
from centella.backends.webgpu.pace import Pace
from centella.backends.webgpu.prepared import Ahead, Prepared, prepared
from centella.backends.webgpu.raw import SLOT, Checked, Commands, Dispatch, Encoder, Pipeline
from centella.backends.webgpu.slots import PARAMS, Slots
from centella.backends.webgpu.staging import Staging
from centella.backends.webgpu.stamps import Stamps
from centella.backends.webgpu.ticket import WebGpuTicket, finished
from centella.backends.webgpu.warm import Warm
from centella.emit.program import HostProgram, Program
from centella.errors import CompileError, DeviceError, DeviceLostError, LimitError, OutOfMemoryError
from centella.host.interrupts import uninterrupted
from centella.host.log import logger
from centella.ledger.counts import count
from centella.specs import Caps

STORAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
MOST = 1 << 34  # bytes of a buffer that is of use: kernels count elements in 32 bits
BUFFER_SETS = 4  # for which a plan's launches are remembered: its memory takes turns


class WebGpuBackend(Backend):
    """One wgpu device."""

    native: Any = None

    def __init__(self, which: str = "", *, minimum: bool = False, native: Any = None) -> None:
        if native is not None:
            check_native(which, minimum, native)
        adapter = native.adapter if native is not None else find_adapter(which)
        self.adapter: Any = adapter
        self.name: str = f"webgpu:{adapter.info['device']}"
        self.software: bool = is_software(adapter)
        if self.software:
            logger("device").info("%s is a software adapter: the CPU is faster", self.name)
        self.pace: Pace | None = None if self.software else Pace(adapter.info["adapter_type"])
        self.lock: threading.RLock = threading.RLock()
        self._owned = native is None
        self.native = native if native is not None else open_device(adapter, minimum)
        if TIMER not in self.native.features:
            self.clock: Clock = Clock(missing=f"this wgpu device was opened without {TIMER}")
        limits = self.native.limits
        rounds, powers = functions.agrees(self.native)
        self.caps: Caps = Caps(
            target="wgsl",
            row_alignment=16,
            max_storage_buffers=limits["max-storage-buffers-per-shader-stage"],
            max_binding=limits["max-storage-buffer-binding-size"] // 16 * 16,
            binding_alignment=limits["min-storage-buffer-offset-alignment"],
            max_buffer=min(limits["max-buffer-size"], MOST) // 16 * 16,
            max_workgroup=min(
                limits["max-compute-invocations-per-workgroup"],
                limits["max-compute-workgroup-size-x"],
            ),
            max_shared=limits["max-compute-workgroup-storage-size"],
            max_groups=limits["max-compute-workgroups-per-dimension"],
            subgroups=subgroups.agree(self.native),
            native_f16_pack=rounds,
            native_exp2=powers,
            rewrites_arithmetic=arithmetic.rewrites(self.native),
            max_loop_rounds=loops.most_rounds(self.native),
            family=family_of(adapter),
        )
        self._queue = self.native.queue
        stopped = self._new_buffer(8, STORAGE) if self.caps.max_loop_rounds else None
        self._stopped: Any = stopped
        self._stops: loops.Stops = loops.Stops(self.caps.max_loop_rounds)
        self.groups: Groups = Groups(self.native, stopped)
        self.ahead: Ahead = Ahead(self.native)
        self._warm: Warm = Warm(self.native)
        self._staging = Staging(self._new_buffer, self.caps.max_buffer, self.name)
        self._reading: WeakSet[WebGpuTicket] = WeakSet()
        self._slots = Slots(self._new_buffer, self.groups)

    def runs_on(self, native: object) -> bool:
        """Whether this is its wgpu device."""
        return native is self.native

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Any:
        """Device memory of `nbytes`."""
        return self._new_buffer(nbytes, STORAGE)

    def _new_buffer(self, nbytes: int, usage: int) -> Any:
        try:
            return self.native.create_buffer(size=nbytes, usage=usage)
        except Exception as error:
            raise OutOfMemoryError(f"{self.name}: no room for {nbytes:,} bytes: {error}") from error

    def free(self, native: Any) -> None:
        """Give memory back to the driver."""
        self.disown(native)
        native.destroy()

    def adopt(self, native: object) -> tuple[Any, int]:
        """A buffer of the application's that launches may bind, and its bytes."""
        if not isinstance(native, wgpu.GPUBuffer) or native._device is not self.native:
            raise DeviceError(f"{self.name}: expected a buffer of this wgpu device, got {native!r}")
        needed = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
        if native.usage & needed != needed:
            raise DeviceError(f"{self.name}: an imported buffer needs usage STORAGE and COPY_SRC")
        if native.map_state != "unmapped":
            raise DeviceError(f"{self.name}: an imported buffer must not be mapped")
        if native.size % 4 or not 0 < native.size <= self.caps.max_buffer:
            raise DeviceError(
                f"{self.name}: an imported buffer has a multiple of 4 bytes, at most "
                f"{self.caps.max_buffer:,}; this one has {native.size:,}"
            )
        try:  # wgpu says nowhere whether a buffer was destroyed
            part = (0, min(native.size, self.caps.max_binding))
            self.groups.new(self.groups.layout((False,))[0], [native], (part,), self._slots.buffer)
        except Exception as error:
            raise DeviceError(
                f"{self.name}: an imported buffer cannot be bound: {error}"
            ) from error
        return native, native.size

    def disown(self, native: Any) -> None:
        """Forget the bind groups of a buffer, whose id may soon be another's."""
        with self.lock:
            self.groups.forget(native)

    def write(self, buffer: Buffer, data: Array) -> None:
        """Copy host bytes into device memory, in order with submissions."""
        with self.lock, Checked():
            raw.write(self._queue, buffer.native, data)

    def write_parts(self, buffer: Buffer, nbytes: int, step: int) -> Iterator[Array]:
        """Copy host bytes part after part.

        wgpu copies what is written, and keeps that until a later submission is done: so each part
        is submitted, and waited for when the next one has been read.
        """
        part = np.empty(min(step, nbytes), np.uint8)
        sent: WebGpuTicket | None = None
        for start in range(0, nbytes, step):
            data = part[: nbytes - start]
            yield data
            if sent is not None:
                sent.wait()
            with self.lock, Checked():
                raw.write(self._queue, buffer.native, data, start)
                raw.submit(self._queue, ())
                sent = WebGpuTicket(self.native, None, 0, [], self._staging.give_back)
        if sent is not None:
            sent.wait()

    # -- programs ---------------------------------------------------------------------------------

    def compile(self, program: Program | HostProgram) -> Pipeline:
        """The driver's form of a program."""
        assert isinstance(program, Program)
        if 4 * (1 + len(program.ir.params)) > SLOT:
            raise LimitError(
                f"kernel {program.name!r}: {len(program.ir.params)} launch parameters; at most "
                f"{SLOT // 4 - 1} fit"
            )
        writable = tuple(a.writable for a in program.ir.args)
        group, layout = self.groups.layout(writable, program.reports)
        if program.reports:
            self._stops.names[int(program.ir.digest[:8], 16)] = program.name
        try:
            if program.trusted and not self.software:
                module = raw.trusted_module(self.native, program.source, program.name)
            else:
                module = self.native.create_shader_module(code=program.source, label=program.name)
            pipeline = self.native.create_compute_pipeline(
                layout=layout, compute={"module": module, "entry_point": "main"}
            )
        except Exception as error:
            raise CompileError(program.name, program.source, str(error)) from error
        return pipeline, group, pipeline._internal

    # -- submission -------------------------------------------------------------------------------

    def warm(self, work: Submission) -> None:
        """Have pipelines compiled that the driver compiles at their first use."""
        if work.launches and not self.clock.missing:
            with self.lock, Checked():
                self._warm.run(work.launches, work.prepared or self._prepared_of(work))

    def submit(self, work: Submission) -> WebGpuTicket:
        """Start a submission."""
        with self.lock:
            stamps = None
            if work.timed and work.launches and not self.clock.missing:
                stamps = Stamps(self.native, len(work.launches))
                count(timing_bytes=stamps.nbytes)
            sizes = [read.nbytes for read in work.reads]
            check = None
            if sizes and self._stops.names:
                check = partial(self._stops.check, len(sizes), self._stops.count)
                sizes.append(self._stopped.size)
            if stamps is not None:
                sizes.append(stamps.nbytes)
            places, nbytes = packed(sizes)
            staging = self._staging.take(nbytes) if places else None
            try:
                with Checked():
                    for slot, data in work.uploads:
                        raw.write(self._queue, work.slots[slot].native, data)
                    commands = self._encode(work, stamps, staging, places)
                    if commands or work.uploads:
                        raw.submit(self._queue, commands)
            except OutOfMemoryError:
                raise
            except Exception as error:
                raise DeviceError(f"{self.name} refused a submission: {error}") from error
            course = None if self.pace is None else self.pace.begin(work.total)
            ticket = WebGpuTicket(
                self.native, staging, nbytes, places, self._staging.give_back, stamps, course,
                self.ahead.encode, check,
            )  # fmt: skip
            if staging is not None:
                self._reading.add(ticket)
            return ticket

    def _encode(
        self, work: Submission, stamps: Stamps | None, staging: Any,
        places: list[tuple[int, int]],
    ) -> list[Commands]:  # fmt: skip
        """Copies, launches in one pass, or each in its own where they are timed, and read-backs.

        Returns:
            The commands after the last cut; those before it were submitted.
        """
        commands: list[Commands] = []
        encoder: Encoder | None = None
        if work.copies:
            encoder = Encoder(self.native)
            for copy in work.copies:
                source, target = work.slots[copy.source].native, work.slots[copy.target].native
                encoder.copy(source, copy.first, target, copy.start, copy.nbytes)
        if work.launches:
            again: Prepared = work.prepared or self._prepared_of(work)
            cuts = () if self.pace is None else self.pace.cuts(work)
            spare = self.ahead.taken(again) if stamps is None and not cuts else None
            self.ahead.ran(again)
            if spare is None:
                encoder = self._launches(encoder, again.dispatches, cuts, stamps)
            else:
                commands += (spare,) if encoder is None else (encoder.finish(), spare)
                encoder = None
        if places:
            encoder = encoder or Encoder(self.native)
            for read, (at, nbytes) in zip(work.reads, places, strict=False):
                encoder.copy(work.slots[read.slot].native, read.start, staging, at, nbytes)
            if len(places) > len(work.reads) + (stamps is not None):
                encoder.copy(self._stopped, 0, staging, *places[len(work.reads)])
            if stamps is not None:
                stamps.copy_to(encoder, staging, places[-1][0])
        return commands if encoder is None else [*commands, encoder.finish()]

    def _launches(
        self, encoder: Encoder | None, dispatches: Sequence[Dispatch], cuts: Sequence[int],
        stamps: Stamps | None,
    ) -> Encoder:  # fmt: skip
        """Launches after what is encoded; those before the last cut are submitted."""
        encoder = encoder or Encoder(self.native)
        if stamps is None and not cuts:
            encoder.launch(dispatches)
            return encoder
        for first, last in pairwise((0, *cuts, len(dispatches))):
            if first:
                raw.submit(self._queue, (encoder.finish(),))
                encoder = Encoder(self.native)
            part = dispatches[first:last]
            if stamps is None:
                encoder.launch(part)
                continue
            for index, dispatch in enumerate(part, first):
                encoder.launch((dispatch,), stamps.around(index))
        return encoder

    def prepare(self, work: Submission) -> Prepared:
        """Parameters written, groups bound."""
        launches = work.launches
        with self.lock:
            params = self._new_buffer(len(launches) * SLOT, PARAMS)
            offsets = raw.Offsets(len(launches))
            with Checked():
                self._write_params(params, 0, launches)
            natives = [buffer.native for buffer in work.slots]
            groups = [
                self.groups.new(b.pipeline[1], [natives[s] for s in b.slots], b.windows, params)
                for b in launches
            ]
        return prepared(launches, groups, params, offsets, self.caps.max_groups)

    def _prepared_of(self, work: Submission) -> Prepared:
        """Launches as they ran before on these buffers; else their parameters are written now."""
        launches = work.launches
        natives = [buffer.native for buffer in work.slots]
        known: Prepared | None = work.again.get((self.groups.epoch, *map(id, natives)))
        if known is None:
            if len(work.again) >= BUFFER_SETS:
                work.again.clear()
            first = self._slots.take(len(launches))
            offsets = raw.Offsets(len(launches), first)
            self._write_params(self._slots.buffer, first, launches)
            groups = self.groups.of_launches(launches, natives, self._slots.buffer)
            known = prepared(launches, groups, self._slots.buffer, offsets, self.caps.max_groups)
            work.again[self.groups.epoch, *map(id, natives)] = known
        return known

    def _write_params(self, params: Any, first: int, launches: list[Launch]) -> None:
        """The parameters of launches, a slot each from `first` on."""
        words = b"".join([bound.parameters.ljust(SLOT, b"\0") for bound in launches])
        raw.write(self._queue, params, np.frombuffer(words, np.uint8), first * SLOT)
        count(parameter_bytes=len(words))

    def describe(self) -> About:
        """Name, driver and limits."""
        info = self.adapter.info
        return {
            "device": "webgpu",
            "name": info["device"],
            "driver": info["description"],
            "api": info["backend_type"],
            "type": info["adapter_type"],
            "wgpu": wgpu.__version__,
            "max_binding": self.caps.max_binding,
            "max_shared": self.caps.max_shared,
            "cooperative_matrix": "offered" if offered(self.adapter) else "none",
        }

    def before_fork(self) -> None:
        """Have no other thread in the driver."""
        raw.gate.lock.acquire()

    def after_fork(self, *, child: bool) -> bool:
        """A child has no driver: none survives a fork."""
        raw.gate.lock.release()
        return not child

    def finish(self, patience: float) -> bool:
        """Wait for all that was submitted; no other thread is called back any more."""
        return finished(self.native, patience)

    @uninterrupted
    def close(self) -> None:
        """Release the device; one that the application brought stays open, our buffers go.

        Whoever has asked for data gets it.
        """
        with suppress(DeviceLostError):
            for ticket in list(self._reading):
                ticket.wait()
        if self._owned:
            self.native.destroy()
            return
        self.groups.clear()
        for buffer in (self._slots.buffer, *self._staging):
            buffer.destroy()
        self._staging.clear()
        if self._stopped is not None:
            self._stopped.destroy()
