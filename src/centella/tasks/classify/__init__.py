"""Texts, pairs of texts and tokens to labels; documents in the order of a question."""
