"""What was asked for: values, nodes in order, and the history of a value."""
