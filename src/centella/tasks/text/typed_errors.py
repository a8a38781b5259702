"""What the library of tokenizers raises, as errors of this one."""

from __future__ import annotations

from centella.errors import CentellaError, WeightsError
from centella.weights.model_files import show


class TypedErrors:
    """Errors of the library as ours: it raises bare Exception, and Rust's panics."""

    __slots__ = ("_expected",)

    def __init__(self, expected: str) -> None:
        self._expected = expected

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Raise ours in the place of the library's."""
        if isinstance(error, CentellaError):
            return
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise WeightsError(f"{self._expected}, got: {show(str(error))}") from error
