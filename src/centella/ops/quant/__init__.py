"""Quantised weights: a file a format, the table of them, and the kernels that read their planes."""
