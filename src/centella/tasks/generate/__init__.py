"""Prompts to texts: sampling, beams, speculation, streams."""
