"""From recorded nodes to launches: pure functions."""
