"""Recordings to segments and words with their times."""
