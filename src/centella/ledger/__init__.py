"""What happened: counts, device times, the lines of the application that caused it."""
