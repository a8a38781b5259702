"""Calls of the CUDA driver: its statuses as errors, and the devices there are."""

from __future__ import annotations

from typing import Any

from centella.errors import DeviceError, DeviceLostError, MissingExtraError, OutOfMemoryError

try:
    # A compiled module, of which type checkers see nothing.
    from cuda.bindings import driver as bindings  # pyright: ignore[reportAttributeAccessIssue]
except ImportError as _missing:
    raise MissingExtraError("cuda-bindings", "cuda") from _missing

driver: Any = bindings

KNOWN: tuple[int, ...] = (
    50,
    52,
    60,
    61,
    70,
    75,
    80,
    86,
    87,
    89,
    90,
    100,
    103,
    120,
    121,
)  # capabilities, times 10
# Errors after which a context can do nothing any more.
STICKY: tuple[Any, ...] = tuple(
    getattr(driver.CUresult, f"CUDA_ERROR_{name}")
    for name in (
        "ILLEGAL_ADDRESS LAUNCH_FAILED MISALIGNED_ADDRESS LAUNCH_TIMEOUT ILLEGAL_INSTRUCTION "
        "INVALID_ADDRESS_SPACE INVALID_PC HARDWARE_STACK_ERROR ASSERT ECC_UNCORRECTABLE "
        "NVLINK_UNCORRECTABLE CONTEXT_IS_DESTROYED UNKNOWN"
    ).split()
)


def explain(status: Any) -> str:
    """Name and description of a driver status."""
    _, name = driver.cuGetErrorName(status)
    _, text = driver.cuGetErrorString(status)
    return f"{(name or b'?').decode()}: {(text or b'').decode()}"


def check(result: tuple[Any, ...]) -> Any:
    """The values of a driver call.

    Raises:
        OutOfMemoryError, DeviceLostError, DeviceError: by status.
    """
    status, *values = result
    if status == driver.CUresult.CUDA_SUCCESS:
        return values[0] if len(values) == 1 else tuple(values)
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise OutOfMemoryError(explain(status))
    raise (DeviceLostError if status in STICKY else DeviceError)(explain(status))


def device_count() -> int:
    """CUDA devices of this machine.

    Raises:
        DeviceError: when there is no driver.
    """
    try:
        check(driver.cuInit(0))
        return int(check(driver.cuDeviceGetCount()))
    except DeviceError as error:
        raise DeviceError(f"no CUDA device: {error}") from error
    except RuntimeError as error:
        raise DeviceError(f"no CUDA device: the NVIDIA driver was not found ({error})") from error


def load(function: Any) -> bool:
    """Load a function now that the driver left to its first launch; whether it was so.

    Drivers before CUDA 12.4 do not say.
    """
    if check(driver.cuDriverGetVersion()) < 12_040 or not hasattr(driver, "cuFuncIsLoaded"):
        return False
    unloaded = driver.CUfunctionLoadingState.CU_FUNCTION_LOADING_STATE_UNLOADED
    if check(driver.cuFuncIsLoaded(function)) != unloaded:
        return False
    check(driver.cuFuncLoad(function))
    return True


def arch_of(major: int, minor: int) -> str:
    """The PTX target of a compute capability; an unknown newer one gets plain sm_90."""
    capability = 10 * major + minor
    if capability in KNOWN:
        return "sm_90a" if capability == 90 else f"sm_{capability}"
    return f"sm_{max((c for c in KNOWN if c <= min(capability, 90)), default=50)}"
