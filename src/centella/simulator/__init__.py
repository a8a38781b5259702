"""The kernel IR run by NumPy, with every access checked."""
