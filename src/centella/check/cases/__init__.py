"""What shows that a device computes right: cases of every operation, compared with float64.

The tests of the library and `centella check` read the same table.
"""
