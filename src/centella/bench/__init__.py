"""Measurements that the library takes of itself: `floor`, three claims of two other systems."""

from centella.bench.figures import Figure, Report
from centella.bench.floor import floor

__all__ = ["Figure", "Report", "floor"]
