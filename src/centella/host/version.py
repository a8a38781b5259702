"""The version of this library, for `centella.__version__` and for what outlives a process."""

__version__: str = "0.1.0"
