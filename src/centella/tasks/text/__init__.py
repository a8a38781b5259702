"""Texts to token ids and back, and batches of them by length."""
