"""CUDA: PTX handed to the driver's own compiler; nothing of the toolkit is needed.

driver.py    calls of the driver, its statuses as errors, the devices there are
listing.py   the devices as plain data
interop.py   what other libraries call a device, a stream and memory
stream.py    where work goes, and that it stays in one order
memory.py    a device's memory, context and streams
backend.py   programs, submissions
ticket.py    a submission under way
"""

from centella.backends.cuda.backend import CudaBackend
from centella.backends.cuda.driver import arch_of, check, device_count
from centella.backends.cuda.interop import CudaNative
from centella.backends.cuda.listing import listed

__all__ = ["CudaBackend", "CudaNative", "arch_of", "check", "device_count", "listed"]
