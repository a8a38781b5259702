"""Sound to what models read, and transcripts to files.

stream      any audio as mono samples at 16 kHz, in pieces
mel         log-mel spectrograms
transcript  segments and words, the result of speech models
subtitles   transcripts as text, SRT, WebVTT, TSV, JSON
"""
