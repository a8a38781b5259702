"""Products of each row with the weights of the experts that were chosen for it: `op.py`."""
