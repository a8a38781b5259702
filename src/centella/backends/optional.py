"""What a backend may offer beside what it has to (`base.py`), and what stands for each."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from centella.backends.buffer import Array, Buffer
from centella.errors import DeviceError
from centella.specs import Spec


class Interop(Protocol):
    """Optional: a device's own handle and memory, shared with applications and other libraries.

    Attributes:
        name: of the device, in messages.
        dlpack: type and number of the device, where DLPack has them.
    """

    name: str
    dlpack: tuple[int, int] | None = None

    @property
    def native(self) -> Any:
        """The driver's own device, None on the host."""
        return None

    def runs_on(self, native: object) -> bool:
        """Whether `native` is how an application names the driver's own device."""
        return False

    def adopt(self, native: object) -> tuple[Any, int]:
        """Memory of the application's, to be read in place: what launches bind, and its bytes.

        Raises:
            DeviceError: for what is no memory of this device, or cannot be bound and read.
        """
        raise DeviceError(f"{self.name}: imports no memory; copy the data with asarray")

    def disown(self, native: Any) -> None:
        """Forget what `adopt` gave: no value refers to it any more."""
        return

    def shown(self, buffer: Buffer) -> Any:
        """What applications see of a buffer: what launches bind; on the CPU, once computed.

        Called without the device's lock.
        """
        return buffer.native

    def lend(self, buffer: Buffer, stream: object) -> tuple[int, Any]:
        """The address of a buffer for another library, and what that holds while it uses it.

        Called without the device's lock, only where `dlpack` is not None.

        Args:
            stream: where the library works, as the array API's `__dlpack__` says it.

        Raises:
            BufferError: there is no such stream.
        """
        raise BufferError(f"DLPack: {self.name} does not export memory")

    def glance(self, buffer: Buffer, spec: Spec, offset: int) -> Array | None:
        """The array that a Spec describes in host memory, to be printed; None on other devices."""
        return None


class Process(Protocol):
    """Optional: what a backend does when its process forks or ends."""

    def before_fork(self) -> None:
        """Leave nothing to a thread that a child process will not have."""
        return

    def after_fork(self, *, child: bool) -> bool:
        """Go on; False in a child where the driver cannot."""
        return True

    def finish(self, patience: float) -> bool:
        """The process ends: wait until everything is done, and let no other thread in any more.

        Called from the main thread, which keeps the device's lock and may go on using it.

        Returns:
            False where it was not done after `patience` seconds.
        """
        return True


class Streams(Protocol):
    """Optional: work that goes where the application says."""

    name: str

    def on_stream(self, stream: object) -> AbstractContextManager[Any]:
        """Send what this thread submits to a stream; None: to a new one.

        Raises:
            DeviceError: no stream of this device.
        """
        raise DeviceError(f"stream: expected a CUDA device, got {self.name}")
