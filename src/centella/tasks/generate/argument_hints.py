"""What to write for arguments of other libraries that generate, chat and transcribe do not take."""

from __future__ import annotations

_BEAMS = "beams are of generate: their texts are known when the search ends"
_STREAM = "model.stream(prompt) and model.chat(messages) yield the text in pieces"
_LOADED = "is an argument of ct.load"
_MODEL = "ct.load(path) opens a model, and this is a method of it"
_TEMPLATE = "chat(messages, template={%s: ...}) passes it to the model's chat template"
OF_GENERATE: dict[str, str] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "write max_new_tokens="),
    "max_length": "write max_new_tokens=, without the prompt's tokens",
    **dict.fromkeys(("num_return_sequences", "best_of"), "write n=, of generate"),
    "n": "generate gives several continuations",
    **dict.fromkeys(("stop_strings", "stop_sequences"), "write stop="),
    **dict.fromkeys(("eos_token_id", "stop_token_ids"), "stop= takes special tokens as text"),
    **dict.fromkeys(("top_logprobs", "output_scores", "output_logits"), "write logprobs="),
    "repeat_penalty": "write repetition_penalty=",
    "do_sample": "write temperature=, 0 for the most likely token",
    "temp": "write temperature=",
    **dict.fromkeys(("num_beams", "beams", "beam_size"), "write beam=, of generate"),
    **dict.fromkeys(("beam", "length_penalty", "early_stopping"), _BEAMS),
    **dict.fromkeys(("num_beam_groups", "diversity_penalty"), "beams have no groups here"),
    **dict.fromkeys(("stream", "streamer"), _STREAM),
    "callback": "on_token= of stream and chat is called with each token",
    "tools": 'write chat(messages, template={"tools": [...]}): they are written into the prompt;'
    " a tool call in the answer is text, and is not parsed",
    "tool_choice": "the model chooses: a tool call in the answer is text, and is not parsed",
    **dict.fromkeys(
        ("system", "system_prompt"),
        'write it as the first message of chat: [{"role": "system", "content": "..."}, ...]',
    ),
    "messages": "write chat(messages)",
    **dict.fromkeys(
        ("response_format", "grammar", "json_schema"), "no grammar restricts the answer"
    ),
    "documents": _TEMPLATE % '"documents"',
    "enable_thinking": _TEMPLATE % '"enable_thinking"',
    "batch_size": "all prompts of a call are one batch",
    "draft_model": "write draft=",
    "assistant_model": "write draft=",
    "prompt_lookup_num_tokens": 'write draft="lookup"',
    **{name: f"{name}= {_LOADED}" for name in ("device", "dtype", "quantize")},
    "model": _MODEL,
    "on_token": "stream and chat take it",
    **dict.fromkeys(("template", "parse_special"), "chat takes it"),
}
_RATE = "write rate=, in samples a second"
_WORDS = 'write timestamps="word", "segment" or "none"'
_VAD = 'write vad="auto", "silero", "energy" or "off"'
OF_TRANSCRIBE: dict[str, str] = {
    **dict.fromkeys(("sample_rate", "sampling_rate", "samplerate", "sr"), _RATE),
    **dict.fromkeys(("word_timestamps", "return_timestamps", "without_timestamps"), _WORDS),
    **dict.fromkeys(("beam_size", "beams", "num_beams"), "write beam="),
    "batch_size": "write batch=, windows at once",
    **dict.fromkeys(("vad_filter", "vad_parameters"), _VAD),
    "initial_prompt": "write prompt=",
    **dict.fromkeys(("lang", "source_language"), "write language="),
    "translate": 'write task="translate"',
    "log_prob_threshold": "write logprob_threshold=",
    "condition_on_prev_tokens": "write condition_on_previous_text=",
    "no_repeat_ngram_size": "write no_repeat_ngram=",
    "repetition_penalty": "max_repeats= and no_repeat_ngram= limit repetitions",
    "clip_timestamps": "write regions=",
    "best_of": "one text is sampled at a temperature above 0",
    "fp16": 'ct.load(..., dtype="f16" or "f32") says it',
    **dict.fromkeys(("verbose", "log_progress"), "stream(audio) yields each segment as it comes"),
    "chunk_length_s": "windows are 30 s; batch= says how many are computed at once",
    **{name: f"{name}= {_LOADED}" for name in ("device", "dtype", "quantize")},
    "model": _MODEL,
}
