"""`CommandBatch`: operations recorded one by one, run in one submission.

    batch = device.batch()
    x, w = batch.upload(x), batch.upload(w)
    y = batch.relu(batch.matmul(x, w))
    batch.execute()
    print(batch.read(y))

The floor's words, one line each; every op of `centella` records on an open batch as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import numpy as np

from centella import functional
from centella.device import Device
from centella.device import device as open_device
from centella.dtypes import dtype_of, from_numpy, narrow
from centella.errors import ContractError, DeviceError
from centella.pipelines import PipelineCache
from centella.recording import PENDING, Recording, Value
from centella.tensor import Pending, Tensor, fetch

Array = np.ndarray[Any, Any]


class CommandBatch:
    """Operations on one device that run in one submission; also a context manager.

    Used as `with device.batch() as batch:`, operators on tensors record on it too, and it is
    executed at the end; an exception inside submits nothing.
    """

    def __init__(self, device: str | Device | None = None) -> None:
        self.device = open_device(device)
        self._recording = Recording(self.device, explicit=True)
        self._values: list[Value] = []
        self._operations = 0
        self._kept: list[Value] = []

    # -- data -------------------------------------------------------------------------------------

    def upload(self, data: Any, dtype: Any = None) -> Tensor:
        """Host data as a tensor of this batch; a snapshot is taken now, sent with the batch."""
        array = np.asarray(data)
        if dtype is None and not isinstance(data, (np.ndarray, np.generic)):
            array = array.astype({"f": np.float32, "i": np.int32}.get(array.dtype.kind, array.dtype))
        kind = from_numpy(array.dtype) if dtype is None else dtype_of(dtype)
        spec = self.device.spec(array.shape, kind)
        value = Value(spec, self.device, "upload")
        self.device.upload_to(self._recording, value, narrow(array, kind))
        return Tensor(value, spec)

    def _record(self, name: str, *operands: Any, **options: Any) -> Tensor:
        for operand in operands:
            if isinstance(operand, Tensor):
                self._check(name, operand)
        stack = self.device.batches()
        stack.append(self._recording)
        try:
            return getattr(functional, name)(*operands, **options)  # type: ignore[no-any-return]
        finally:
            stack.pop()

    def _check(self, name: str, tensor: Tensor) -> None:
        if tensor.device is not self.device:
            raise DeviceError(
                f"{name}: the batch is on {self.device.name}, the tensor on {tensor.device.name}"
            )
        recording = tensor._value.recording
        if tensor._value.state == PENDING and recording is not None:
            if recording.explicit and recording is not self._recording:
                raise ContractError(
                    f"{name}: the tensor belongs to another batch that has not been executed"
                )

    # -- operations -------------------------------------------------------------------------------

    def relu(self, x: Tensor) -> Tensor:
        """max(x, 0)."""
        return self._record("relu", x)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor."""
        return self._record("scale", x, factor)

    def add(self, a: Tensor, b: Tensor | float) -> Tensor:
        """a + b."""
        return self._record("add", a, b)

    def sub(self, a: Tensor, b: Tensor | float) -> Tensor:
        """a - b."""
        return self._record("sub", a, b)

    def mul(self, a: Tensor, b: Tensor | float) -> Tensor:
        """a * b."""
        return self._record("mul", a, b)

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Sum of products of two vectors."""
        return self._record("dot", a, b)

    def sigmoid(self, x: Tensor) -> Tensor:
        """1 / (1 + exp(-x))."""
        return self._record("sigmoid", x)

    def tanh(self, x: Tensor) -> Tensor:
        """Hyperbolic tangent."""
        return self._record("tanh", x)

    def swish(self, x: Tensor) -> Tensor:
        """x sigmoid(x)."""
        return self._record("swish", x)

    def gelu(self, x: Tensor, approximate: str = "none") -> Tensor:
        """GELU; `approximate` is none, tanh or quick."""
        return self._record("gelu", x, approximate)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """A B, batched and transposed by views."""
        return self._record("matmul", a, b)

    # -- running ----------------------------------------------------------------------------------

    @property
    def num_operations(self) -> int:
        """Operations recorded so far, executed or not (not fused launches)."""
        return self._operations + len(self._recording)

    @property
    def num_buffers(self) -> int:
        """Values of this batch: uploads and results recorded and not yet executed."""
        outputs = builtin_sum(len(n.outputs) for n in self._recording.nodes)
        return outputs + len(self._recording.uploads)

    @property
    def native(self) -> Any:
        """The driver's device."""
        return self.device.native

    def keep(self, tensor: Tensor) -> Tensor:
        """Keep a tensor although `execute(outputs=...)` does not name it."""
        self._kept.append(tensor._value)
        return tensor

    def execute(self, outputs: Iterable[Tensor] | None = None) -> Pending[None]:
        """Run what was recorded, in one submission.

        Args:
            outputs: the tensors to keep; default: every tensor that something refers to. Reading
                one that was not kept raises DiscardedError.

        Returns:
            A Pending: `.result()` waits, `await` works; results can be read at once.
        """
        wanted = None
        if outputs is not None:
            wanted = [t._value for t in outputs] + self._kept
        recorded = len(self._recording)
        ticket = self.device.run(self._recording, outputs=wanted)
        self._operations += recorded
        self._kept = []
        return Pending([ticket], lambda: None)

    def execute_with_cache(
        self, cache: PipelineCache, outputs: Iterable[Tensor] | None = None
    ) -> Pending[None]:
        """`execute`, compiling into (and from) a given PipelineCache."""
        with self.device.lock:
            own, self.device.cache = self.device.cache, cache
            try:
                return self.execute(outputs)
            finally:
                self.device.cache = own

    def read(self, tensor: Tensor) -> Array:
        """The data of a tensor on the host.

        Raises:
            ContractError: before `execute`.
            DiscardedError: when it was not kept.
        """
        self._check("read", tensor)
        tensor._value.require()
        return fetch(tensor).result()[0]

    # -- scope ------------------------------------------------------------------------------------

    def __enter__(self) -> CommandBatch:
        self.device.batches().append(self._recording)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.device.batches().remove(self._recording)
        if kind is not None:
            self._recording.fail()
        elif not self._recording.empty:
            self.execute()


builtin_sum = sum
