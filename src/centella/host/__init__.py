"""The machine that Python runs on: threads, BLAS, cache files, forks, work in blocks."""
