"""Small random Whisper models, with what transformers computes of them in float64.

    python tests/reference/whisper.py [NAME ...]

Writes `tests/data/whisper/mel.npz`, log-mel spectrograms of `chirp` by its feature extractor:

    mel80    f32 [80, 150]; mel128 f32 [128, 150]

and `tests/data/whisper/NAME/`: config.json, generation_config.json, tokenizer.json,
preprocessor_config.json, model.safetensors (f16; of turbo in shards), and expected.npz, of two
windows of `mel`:

    states   f32 [2, 30, d_model]       of every fifth position
    ids      i32 [2, 11]                random tokens; logits f32 [2, 11, vocab]
    greedy   i32 [2, 30]                the most likely token after the begin, no rules
    timed    i32 [2, 40]                `generate(return_timestamps=True)`, padded with the end
    plain    i32 [2, 40]                `generate()`, without timestamps
    beams    i32 [2, 40]                `generate(num_beams=5)`, without timestamps
    language i32 [2]                    what `detect_language` gives; -1: the model has none
    speech   f32 [2]                    probability of no speech
    means    f32 [2]                    mean log-probability of `timed`
    times    f32 [2, 40]                `token_timestamps` of `timed`, in seconds
    words    str [w], spoken f32 [w, 3] words of `timed`, with a letter for each byte of a token:
                                        row, start and end in seconds
    grams    i32 [2, 40]                `generate(no_repeat_ngram_size=3)`, without timestamps
    told     i32 [2, 40]                `generate(prompt_ids=PROMPT, return_timestamps=True)`
    timed_beams i32 [2, 40]             `generate(num_beams=5, return_timestamps=True)`
    limits   f32 [3], tried i32 [3, 2, 2, 2] `generate(temperature=HEATS)` with each of these
                                        logprob_threshold, each of SILENCES and each row: how many
                                        temperatures it took, and whether the window was skipped
    long     i32 [n], bounds f32 [k, 2] tokens of a recording of `LONG` frames in sequence, each
                                        window told the text before it, and the times of segments
                                        that have a text and begin within the recording
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from transformers.models.whisper import tokenization_whisper
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

FOLDER = Path(__file__).resolve().parents[1] / "data" / "whisper"
POSITIONS, TARGETS = 150, 64  # three seconds a window
LONG = 1110
FRAMES = (300, 220)  # of each window that sound is in, for `times`
PROMPT = (5, 30, 77, 64, 258)  # text before a window
HEATS = (0.0, 1e-3)  # temperatures; at the second the most likely token is drawn, too
SILENCES = (0.9, 0.0)  # values of no_speech_threshold
LANGUAGES = ("en", "de", "fr", "es")
SIZES: dict[str, Any] = {
    "d_model": 72, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 60, "decoder_ffn_dim": 60,
    "max_source_positions": POSITIONS, "max_target_positions": TARGETS, "num_mel_bins": 80,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "large": {"num_mel_bins": 128, "encoder_layers": 2},
    "turbo": {"num_mel_bins": 128, "decoder_layers": 4},
    "distil-en": {"decoder_layers": 1, "decoder_ffn_dim": 52},
}
# Of the logit of the end: enough that some texts end.
ENDING = {"tiny": 2.9, "large": 2.3, "turbo": 2.1, "distil-en": 1.7}
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ġ", "the"), ("i", "n"), ("Ġ", "w"), ("e", "r")]


def tokenizer(english: bool) -> tuple[Any, dict[str, int]]:
    """Bytes, a few merges, and Whisper's special tokens; and the ids of the last."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate([*letters, *(a + b for a, b in MERGES)])}
    native: Any = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=MERGES))
    native.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = tokenizers.decoders.ByteLevel()
    names = ["endoftext", "startoftranscript", *(() if english else LANGUAGES), "translate",
             "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]  # fmt: skip
    special = [f"<|{n}|>" for n in names]
    native.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in special])
    stamps = [f"<|{i * 0.02:.2f}|>" for i in range(POSITIONS + 1)]
    native.add_tokens([tokenizers.AddedToken(t, special=False) for t in stamps])
    return native, {n: native.token_to_id(f"<|{n}|>") for n in names}


def mel(mels: int) -> torch.Tensor:
    """Two windows [2, mels, 300] of what a spectrogram's values might be."""
    values = np.random.default_rng(mels).standard_normal((2, mels, 2 * POSITIONS))
    return torch.from_numpy(np.clip(values.astype(np.float32), -1, 1.5))


def long(mels: int) -> torch.Tensor:
    """A recording [1, mels, LONG] of the same kind."""
    values = np.random.default_rng(mels + 1).standard_normal((1, mels, LONG))
    return torch.from_numpy(np.clip(values.astype(np.float32), -1, 1.5))


def settings(name: str, ids: dict[str, int], config: Any) -> dict[str, Any]:
    """A generation_config.json as the released models have them."""
    english = name.endswith("-en")
    end, start = ids["endoftext"], ids["startoftranscript"]
    entries: dict[str, Any] = {
        "decoder_start_token_id": start, "bos_token_id": end, "eos_token_id": end,
        "pad_token_id": end, "no_timestamps_token_id": ids["notimestamps"],
        "prev_sot_token_id": ids["startofprev"], "is_multilingual": not english,
        "begin_suppress_tokens": [220, end], "max_initial_timestamp_index": 50,
        "suppress_tokens": [1, 2, 7, 8, 9, 10, start, ids["translate"], ids["transcribe"],
                            ids["startoflm"], ids["startofprev"], ids["nospeech"],
                            *(ids[n] for n in LANGUAGES if n in ids)],
        "alignment_heads": [[layer, head] for layer in range(config.decoder_layers)
                            for head in range(3) if (layer + head) % 2 or not layer],
        "max_length": TARGETS,
    }  # fmt: skip
    if not english:
        entries["lang_to_id"] = {f"<|{n}|>": ids[n] for n in LANGUAGES}
        entries["task_to_id"] = {n: ids[n] for n in ("transcribe", "translate")}
    return entries


def write(name: str, seed: int) -> Path:
    """A model folder with random weights."""
    english = name.endswith("-en")
    words, ids = tokenizer(english)
    vocab, end = words.get_vocab_size(), ids["endoftext"]
    config = transformers.WhisperConfig(
        **{**SIZES, **MODELS[name]}, vocab_size=vocab, bos_token_id=end, eos_token_id=end,
        pad_token_id=end, decoder_start_token_id=ids["startoftranscript"],
        begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    whisper: Any = transformers.WhisperForConditionalGeneration
    model = whisper(config).eval()
    with torch.no_grad():
        for path, p in model.named_parameters():
            if "embed_positions" in path and "encoder" in path:
                continue  # the sinusoids
            spread = 0.15 if p.ndim == 1 else 0.25 if "embed_tokens" in path else 0.18
            spread = 0.3 if "encoder_attn" in path and "_proj.weight" in path else spread
            centre = 1.0 if p.ndim == 1 and "norm" in path and "weight" in path else 0.0
            p.copy_(centre + spread * torch.randn_like(p))
        words_of, bias = model.proj_out.weight, model.model.decoder.layer_norm.bias
        for first, last, more in (
            (end, end + 1, ENDING[name]),
            (ids["notimestamps"] + 1, vocab, 1.0),
        ):
            words_of[first:last] += more * bias / bias.square().sum()  # so that texts end
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    shards = {"max_shard_size": "280KB"} if name == "turbo" else {}
    model.half().save_pretrained(folder, safe_serialization=True, **shards)
    values = settings(name, ids, config)
    (folder / "generation_config.json").write_text(json.dumps(values, indent=1) + "\n")
    words.save(str(folder / "tokenizer.json"), pretty=False)
    seconds = POSITIONS // 50
    extractor: Any = transformers.WhisperFeatureExtractor
    extractor(feature_size=config.num_mel_bins, chunk_length=seconds).save_pretrained(folder)
    return folder


def padded(rows: Any, end: int, length: int = 40) -> np.ndarray[Any, Any]:
    """Rows [2, any] as [2, length], filled with the end's id."""
    table = np.full((2, length), end, np.int32)
    table[:, : rows.shape[1]] = rows[:, :length].numpy()
    return table


def tried(
    model: Any, sound: torch.Tensor, limit: float, silence: float, kwargs: dict[str, Any],
    heard: torch.Tensor,
) -> tuple[int, bool]:  # fmt: skip
    """How many temperatures transformers tries for the first window, and whether it skips it."""
    calls: list[tuple[bool, bool]] = []

    def recorded(*given: Any, **named: Any) -> tuple[bool, bool]:
        calls.append(WhisperGenerationMixin._need_fallback(model, *given, **named))
        return calls[-1]

    model._need_fallback = recorded
    model.generate(sound, return_timestamps=True, temperature=HEATS, logprob_threshold=limit,
                   no_speech_threshold=silence, compression_ratio_threshold=None,
                   **{**kwargs, "attention_mask": heard.long()})  # fmt: skip
    del model._need_fallback
    count = next((i for i, (again, _) in enumerate(calls, 1) if not again), len(HEATS))
    count = min(count, len(HEATS))
    return count, bool(calls[count - 1][1])


def spoken(folder: Path, rows: Any, stamps: np.ndarray[Any, Any], end: int) -> dict[str, Any]:
    """Words of each row's runs of text by transformers' rules, and their times."""
    vocab: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    plain = {i: text.replace("\u0120", " ") for text, i in vocab.items()}

    class Words:
        """What `_combine_tokens_into_words` asks of a tokenizer: a letter for each byte."""

        eos_token_id = end

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(plain[i] for i in ids)

    texts, times = [], []
    for row, tokens in enumerate(rows.tolist()):
        tokens = tokens[: min([i for i, t in enumerate(tokens) if t == end], default=39)]
        for is_text, run in itertools.groupby(enumerate(tokens), lambda pair: pair[1] < end):
            at = [i for i, _ in run] if is_text else []
            words, _, indices = tokenization_whisper._combine_tokens_into_words(
                Words(), [tokens[i] for i in at], "german"
            )
            texts += words
            times += [(row, stamps[row, at[i[0]] - 1], stamps[row, at[i[-1]]]) for i in indices]
    return {"words": np.array(texts), "spoken": np.array(times, np.float32)}


def chirp() -> np.ndarray[Any, Any]:
    """A second and a half of a rising tone that fades, and noise, f32 [24000]."""
    t = np.arange(24000) / 16000
    noise = 0.01 * np.random.default_rng(3).standard_normal(t.size)
    return (np.sin(2 * np.pi * (50 + 1500 * t) * t) * np.exp(-t) + noise).astype(np.float32)


def mels() -> None:
    """Write mel.npz."""
    extractor: Any = transformers.WhisperFeatureExtractor
    FOLDER.mkdir(parents=True, exist_ok=True)
    spectrograms = {
        f"mel{n}": extractor(feature_size=n)._np_extract_fbank_features(chirp()[None], "cpu")[0]
        for n in (80, 128)
    }
    np.savez_compressed(FOLDER / "mel.npz", **spectrograms)


def expect(folder: Path) -> str:
    """Write expected.npz; what a reader of the log wants to know of it."""
    whisper: Any = transformers.WhisperForConditionalGeneration
    model = whisper.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    c, g = model.config, model.generation_config
    sound = mel(c.num_mel_bins).double()
    ids = torch.randint(0, c.vocab_size, (2, 11), generator=torch.Generator().manual_seed(5))
    english = not g.is_multilingual
    told = {} if english else {"language": "de", "task": "transcribe"}
    with torch.no_grad():
        states = model.model.encoder(sound).last_hidden_state
        logits = model(sound, decoder_input_ids=ids).logits
        begin = [g.decoder_start_token_id] + (
            [] if english else [g.lang_to_id["<|de|>"], g.task_to_id["transcribe"]]
        )
        row = torch.tensor([begin, begin])
        gaps = []
        for _ in range(30):
            last = model(sound, decoder_input_ids=row).logits[:, -1]
            top = last.topk(2).values
            gaps.append(float((top[:, 0] - top[:, 1]).min()))
            row = torch.cat([row, last.argmax(-1, keepdim=True)], 1)
        first = model(sound, decoder_input_ids=row[:, :1]).logits[:, 0].softmax(-1)
        language = [-1, -1] if english else WhisperGenerationMixin.detect_language(model, sound)
        heard = torch.arange(2 * POSITIONS) < torch.tensor(FRAMES)[:, None]
        kwargs = {"max_new_tokens": 40, "attention_mask": heard.long(), **told}
        once = {**kwargs, "force_unique_generate_call": True, "return_dict_in_generate": True}
        timed = model.generate(sound, return_timestamps=True, output_scores=True, **once)
        sequences = timed.sequences[:, len(begin) :]
        scores = torch.stack(timed.scores, 1).log_softmax(-1)
        chosen = scores.gather(2, sequences[:, : scores.shape[1], None])[..., 0]
        counted = (sequences == g.eos_token_id).cumsum(1) <= 1
        means = chosen.where(counted, 0.0).sum(1) / counted.sum(1)
        timing = {**once, "output_attentions": True, "return_token_timestamps": True}
        times = [
            model.generate(
                sound[i : i + 1], return_timestamps=True,
                **{**timing, "attention_mask": heard[i : i + 1].long()},
            )["token_timestamps"][0, len(begin) :]
            for i in range(2)  # in a batch the padding of a row that has ended would count
        ]  # fmt: skip
        plain = model.generate(sound, **once).sequences[:, len(begin) + 1 :]
        grams = model.generate(sound, no_repeat_ngram_size=3, **once).sequences[:, len(begin) + 1 :]
        segments = model.generate(
            long(c.num_mel_bins).double(), return_timestamps=True, return_segments=True,
            condition_on_prev_tokens=True, max_new_tokens=24, **told,
        )["segments"][0]  # fmt: skip
        segments = [
            part for part in segments
            if (part["tokens"] < g.eos_token_id).any() and part["start"] < LONG / 100
        ]  # fmt: skip
        beams = model.generate(sound, num_beams=5, **once).sequences[:, len(begin) + 1 :]
        several = model.generate(sound, num_beams=5, return_timestamps=True, **once).sequences
        prompt = torch.tensor([g.prev_sot_token_id, *PROMPT])
        prompted = model.generate(sound, prompt_ids=prompt, return_timestamps=True, **once)
        prompted = prompted.sequences[:, len(prompt) + len(begin) :]
        limits = [-100.0, float(means.mean()), 0.0]
        attempts = [[[tried(model, sound[i : i + 1], limit, silence, kwargs, heard[i : i + 1])
                      for i in range(2)] for silence in SILENCES] for limit in limits]  # fmt: skip
    stamps = np.zeros((2, 40), np.float32)
    for into, ends in zip(stamps, times, strict=True):
        into[: len(ends)] = ends[:40].numpy()
    end = g.eos_token_id
    np.savez_compressed(
        folder / "expected.npz", states=states[:, ::5].float().numpy(), ids=ids.int().numpy(),
        logits=logits.float().numpy(), greedy=row[:, len(begin):].int().numpy(),
        language=np.asarray(language, np.int32), speech=first[:, g.no_timestamps_token_id - 1],
        timed=padded(sequences, end), plain=padded(plain, end), beams=padded(beams, end),
        grams=padded(grams, end), told=padded(prompted, end),
        timed_beams=padded(several[:, len(begin) :], end), limits=np.array(limits, np.float32),
        tried=np.array(attempts, np.int32), **spoken(folder, sequences, stamps, end),
        long=np.concatenate([part["tokens"] for part in segments]).astype(np.int32),
        bounds=np.array([[float(part["start"]), float(part["end"])] for part in segments]),
        means=means.float().numpy(), times=stamps,
    )  # fmt: skip
    size = sum(f.stat().st_size for f in folder.iterdir())
    lengths = [sequences.shape[1], plain.shape[1], beams.shape[1]]
    return (
        f"{folder.name}: {size:,} bytes, least gap {min(gaps):.4f}, logits up to "
        f"{float(logits.abs().max()):.2f}, lengths {lengths}, language {language}, timed "
        f"{sequences.tolist()}, means {means.tolist()}"
    )


if __name__ == "__main__":
    mels()
    for wanted in sys.argv[1:] or MODELS:
        print(expect(write(wanted, sum(map(ord, wanted)))))
