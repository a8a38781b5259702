"""What kernels for sm_90a are laid out for: an H200, or an H100 of 132 multiprocessors (SXM, NVL).

On an H100 PCIe, which has 114, launches of a group for each multiprocessor take two waves.
"""

from __future__ import annotations

MULTIPROCESSORS = 132
SHARED = 226 << 10  # bytes of shared memory that the groups of a multiprocessor have together
# Groups of one a multiprocessor, by those of a cluster: a cluster lies in one of the GPCs, whose
# multiprocessors (16 or 18 of an H200) it may not divide.
AT_ONCE = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS, 4: 112, 8: 104}
ALONE = 115 << 10  # a group with so many bytes of shared memory has a multiprocessor to itself
SPARE = 2048  # bytes of barriers, statistics, and what lies between arrays
PANEL = 64  # 16-bit elements of a row that lie together in shared memory, and come as one box
