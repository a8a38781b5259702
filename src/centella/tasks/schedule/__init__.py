"""Many requests that share one model, step by step."""
