"""Running plans on a device: memory, executor, replay, results."""
