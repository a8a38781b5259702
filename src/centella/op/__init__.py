"""What an operation is, and how its work may be divided."""
