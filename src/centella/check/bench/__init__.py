"""Measurements that the library takes of itself: `floor`, three claims of two other systems."""

from centella.check.bench.figures import Figure, Report
from centella.check.bench.floor import floor

__all__ = ["Figure", "Report", "floor"]
