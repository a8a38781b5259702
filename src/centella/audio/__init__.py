"""Sound to what models read, and transcripts to files.

stream      any audio as mono samples at 16 kHz, in pieces
mel         log-mel spectrograms
regions     where somebody speaks, by energy and spectrum or by Silero's network
transcript  segments and words, the result of speech models
subtitles   transcripts as text, SRT, WebVTT, TSV, JSON
"""

from centella.audio.mel import host_log_mel
from centella.audio.regions import SpeechDetector, SpeechRules, speech_pieces, speech_regions
from centella.audio.silero import SileroModel
from centella.audio.stream import AudioStream, open_audio, read_audio, windows
from centella.audio.subtitles import format_transcript
from centella.audio.transcript import Segment, Word, by_word

__all__ = [
    "AudioStream",
    "Segment",
    "SileroModel",
    "SpeechDetector",
    "SpeechRules",
    "Word",
    "by_word",
    "format_transcript",
    "host_log_mel",
    "open_audio",
    "read_audio",
    "speech_pieces",
    "speech_regions",
    "windows",
]
