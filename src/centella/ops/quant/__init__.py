"""Quantised weights: a file a format, the table of them, and the kernels that read their planes."""

from centella.ops.quant.dequantize import DEQUANTIZE
from centella.ops.quant.table import FORMATS

__all__ = ["DEQUANTIZE", "FORMATS"]
