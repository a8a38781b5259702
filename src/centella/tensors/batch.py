"""`CommandBatch`: operations recorded one by one, run in one submission.

    batch = device.batch()
    x, w = batch.upload(x), batch.upload(w)
    y = batch.relu(batch.matmul(x, w))
    batch.execute()
    print(batch.read(y))

The commonest operations have a method of their own, one line each; every op of `centella` records
on an open batch as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any
from weakref import ref

from centella.dtypes import Array
from centella.errors import ContractError, DeviceError, DTypeError
from centella.host.interrupts import guard, uninterrupted
from centella.ledger.call_sites import line_of
from centella.record.recording import Recording
from centella.record.values import PENDING, READY, Value
from centella.runtime.device import Device
from centella.runtime.device import device as open_device
from centella.runtime.pending import Pending
from centella.runtime.pipelines import PipelineCache
from centella.tensors import functional
from centella.tensors.arguments import check_tensors
from centella.tensors.tensor import Tensor, fetch, upload


class CommandBatch:
    """Operations on one device that run in one submission; also a context manager.

    Used as `with device.batch() as batch:`, operators on tensors record on it too, and it is
    executed at the end; an exception inside submits nothing. It can be filled again afterwards.
    What it has not executed when it is dropped has failed.
    """

    def __init__(self, device: str | Device | None = None) -> None:
        self.device: Device = open_device(device)
        self._recording = Recording(self.device, explicit=True)
        self._recording.batch = ref(self)
        self._operations = 0
        self._buffers = 0
        self._kept: list[Value] = []

    def __repr__(self) -> str:
        waiting = len(self._recording.nodes)
        return f"<CommandBatch on {self.device.name}, {waiting} operations to execute>"

    # -- data -------------------------------------------------------------------------------------

    def upload(self, data: Any, dtype: Any = None) -> Tensor:
        """Host data as a tensor of this batch; a snapshot is taken now, sent with the batch.

        Raises:
            DTypeError: float64 or int64 arrays without `dtype=`; a Tensor.
        """
        if isinstance(data, Tensor):
            raise DTypeError(
                f"upload: expected host data, got a Tensor on {data.device.name}; use it as it is, "
                f"or move it with .to(device)"
            )
        tensor = upload("upload", data, dtype, self.device, self._recording)
        self._buffers += 1
        return tensor

    def import_buffer(
        self, native: Any, shape: int | Sequence[int], dtype: Any, *, offset: int = 0
    ) -> Tensor:
        """A tensor over memory that the application owns: see `Tensor.from_buffer`."""
        tensor = Tensor.from_buffer(native, shape, dtype, offset=offset, device=self.device)
        self._buffers += 1
        return tensor

    def _record(self, function: Callable[..., Tensor], *operands: Any) -> Tensor:
        for operand in operands:
            if isinstance(operand, Tensor):
                self._check(function.__name__, operand)
        with self._recording:
            return function(*operands)

    def _check(self, name: str, tensor: Tensor) -> None:
        check_tensors(name, tensor)
        if tensor.device is not self.device:
            raise DeviceError(
                f"{name}: the batch is on {self.device.name}, the tensor on {tensor.device.name}"
            )
        recording = tensor._value.recording
        if recording is None or not recording.explicit or recording is self._recording:
            return
        if not recording.lapse():
            raise ContractError(
                f"{name}: the tensor belongs to another batch that has not been executed"
            )

    # -- operations -------------------------------------------------------------------------------

    def relu(self, x: Tensor) -> Tensor:
        """max(x, 0)."""
        return self._record(functional.relu, x)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor."""
        return self._record(functional.scale, x, factor)

    def add(self, a: Tensor, b: Tensor | float) -> Tensor:
        """a + b."""
        return self._record(functional.add, a, b)

    def sub(self, a: Tensor, b: Tensor | float) -> Tensor:
        """a - b."""
        return self._record(functional.sub, a, b)

    def mul(self, a: Tensor, b: Tensor | float) -> Tensor:
        """a * b."""
        return self._record(functional.mul, a, b)

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Sum of products of two vectors."""
        return self._record(functional.dot, a, b)

    def sigmoid(self, x: Tensor) -> Tensor:
        """1 / (1 + exp(-x))."""
        return self._record(functional.sigmoid, x)

    def tanh(self, x: Tensor) -> Tensor:
        """Hyperbolic tangent."""
        return self._record(functional.tanh, x)

    def swish(self, x: Tensor) -> Tensor:
        """x sigmoid(x)."""
        return self._record(functional.swish, x)

    def gelu(self, x: Tensor, approximate: str = "none") -> Tensor:
        """GELU; `approximate` is none, tanh or quick."""
        return self._record(functional.gelu, x, approximate)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """A B, batched and transposed by views."""
        return self._record(functional.matmul, a, b)

    # -- running ----------------------------------------------------------------------------------

    @property
    def num_operations(self) -> int:
        """Operations recorded so far, executed or not (not fused launches)."""
        return self._operations + len(self._recording.nodes)

    @property
    def num_buffers(self) -> int:
        """Values of this batch so far: uploads, imported buffers and results."""
        return self._buffers + sum(len(n.values) for n in self._recording.nodes)

    @property
    def native(self) -> Any:
        """The driver's device."""
        return self.device.native

    def keep(self, tensor: Tensor) -> Tensor:
        """Keep a tensor although `execute(outputs=...)` does not name it.

        Raises:
            DiscardedError, ContractError: it is too late, or it waits for another batch.
        """
        self._check("keep", tensor)
        if tensor._value.recording is not self._recording:
            tensor.device.recorder.materialise(tensor._value)
        self._kept.append(tensor._value)
        return tensor

    def execute(self, outputs: Iterable[Tensor] | None = None) -> Pending[None]:
        """Run what was recorded since the last time, in one submission.

        Args:
            outputs: the tensors to keep, of those recorded since the last time; default: every
                tensor that something refers to. Reading one that was not kept raises
                DiscardedError.

        Returns:
            A Pending: `.result()` waits, `await` works; results can be read at once.

        Raises:
            ContractError: an output that this batch has not recorded since it was last executed.
            CentellaError: before anything ran (a kernel that does not compile, no memory); names
                the op and the line, and the batch is as it was.
        """
        return self._run(self.device.cache, outputs)

    def execute_with_cache(
        self, cache: PipelineCache, outputs: Iterable[Tensor] | None = None
    ) -> Pending[None]:
        """`execute`, compiling into (and from) a given PipelineCache."""
        if not isinstance(cache, PipelineCache):
            raise ContractError(
                f"execute_with_cache: expected a PipelineCache, got {type(cache).__name__}"
            )
        return self._run(cache, outputs)

    @uninterrupted
    def _run(self, cache: PipelineCache, outputs: Iterable[Tensor] | None) -> Pending[None]:
        guard()
        wanted = self._wanted(outputs)
        with self.device.lock:
            operations, buffers = self.num_operations, self.num_buffers
            ticket = self.device.executor.run(self._recording, outputs=wanted, cache=cache)
            self._operations, self._buffers = operations, buffers
            self._kept = []
        return Pending([ticket], lambda: None)

    def _wanted(self, outputs: Iterable[Tensor] | None) -> list[Value] | None:
        if outputs is None:
            return None
        declared = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        for tensor in declared:
            self._check("outputs", tensor)
            self._check_recorded(tensor)
        return [t._value for t in declared] + self._kept

    def _check_recorded(self, tensor: Tensor) -> None:
        """Refuse an output that waits for nothing here: keeping it would keep no result."""
        value = tensor._value
        if value.recording is self._recording:
            return
        if value.state not in (READY, PENDING):
            value.require()  # raises what happened to it
        raise ContractError(
            f"outputs: expected what this batch has recorded since it was last executed, got "
            f"{value.what} (recorded at {line_of(value.site)}), which is {value.state} and stays "
            f"readable unnamed; name a result of this batch"
        )

    def explain(self, outputs: Iterable[Tensor] | None = None) -> str:
        """The plan of what `execute` would run now, or of what it ran last: a table to read."""
        wanted = self._wanted(outputs) if self._recording.nodes else None
        return self.device.recorder.explain(self._recording, wanted)

    def read(self, tensor: Tensor) -> Array:
        """The data of a tensor on the host.

        Raises:
            ContractError: before `execute`.
            DiscardedError: when it was not kept.
        """
        self._check("read", tensor)
        return fetch(tensor).result()[0]

    # -- scope ------------------------------------------------------------------------------------

    @uninterrupted
    def __enter__(self) -> CommandBatch:
        guard()
        self._recording.__enter__()
        return self

    @uninterrupted
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._recording.__exit__()
        if kind is None:
            self.execute()
            return
        with self.device.lock:
            self._kept = []
            self._recording.fail(f"its batch ended with {kind.__name__}")
