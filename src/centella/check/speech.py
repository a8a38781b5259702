"""What a speech model gives of a window of sound: states of each layer, logits, a transcript.

A transcript follows none of the rules that transcription has (times, forbidden tokens): the most
likely token comes, up to the end of the text.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from centella.audio.log_mel import log_mel
from centella.audio.mel import HOP, RATE
from centella.audio.stream import open_audio, windows
from centella.backends.base import Array
from centella.check.decoder import Decoded, model_of
from centella.nn.kv_cache import KVCache
from centella.tasks.transcribe.session import SpeechSession
from centella.tasks.transcribe.transcriber import Transcriber
from centella.tensors.creation import asarray
from centella.tensors.tensor import Tensor, fetch

STEPS = 64  # tokens of a transcript
MEL = "log_mel"  # path of the spectrogram
STEPPED = "logits, by step"  # path of those that a cache gives


class Sound(Struct, frozen=True, eq=False):
    """What both implementations are given.

    Attributes:
        samples: f32 [n], a window at 16 kHz with zeros behind it.
        prompt: ids that the transcript follows; steps: tokens of it at most; end: the last one.
    """

    samples: Array
    prompt: list[int]
    steps: int
    end: int


def sound_of(task: Transcriber, audio: str | PathLike[str] | None) -> Sound:
    """The first window of a file, or of a sound made of numbers, in the language that is heard.

    Raises:
        AudioError: no audio; names the file.
    """
    config, v = task.model.config, task.config.vocabulary
    with open_audio(_synthetic(config.frames) if audio is None else audio) as stream:
        _, samples = next(windows(stream, config.frames * HOP))
    prompt = [v.start]
    if v.languages:
        session = _session(task)
        session.listen(samples[None])
        prompt += [list(v.languages.values())[int(session.languages()[0].argmax())]]
        prompt += [v.tasks["transcribe"]] if "transcribe" in v.tasks else []
    prompt += [v.no_timestamps]
    return Sound(samples, prompt, min(STEPS, config.max_target_positions - len(prompt)), v.end)


def _synthetic(frames: int) -> Array:
    """A tone that glides, comes and goes, above noise; f32 [n]."""
    t = np.arange(frames * HOP) / RATE
    noise = np.random.default_rng(0).standard_normal(t.size) * 0.02
    tone = 0.3 * np.sin(800 * t + 60 * np.sin(3 * t)) * (np.sin(5 * t) > -0.3)
    sound: Array = (tone + noise).astype(np.float32)
    return sound


def _session(task: Transcriber) -> SpeechSession:
    """A session of one window, in which any token may come."""
    mels = task.model.config.num_mel_bins
    session = SpeechSession(
        task.model, task.config.vocabulary, 1, lambda sound: log_mel(sound, mels)
    )
    session.suppress.choose((), ())
    return session


def run_speech(task: Transcriber, sound: Sound, forced: Sequence[int] | None = None) -> Decoded:
    """What a model of ours gives.

    Args:
        forced: the transcript whose tokens are read; None: its own.
    """
    new = _transcript(task, sound)
    model, read = task.model, [*sound.prompt, *(new if forced is None else forced)][:-1]
    ids = asarray(np.array([read], np.int32), device=model.device)
    samples = asarray(sound.samples[None], device=model.device)
    mel = log_mel(samples, model.config.num_mel_bins)
    states = dict(_states(task, mel, ids))
    logits, stepped = model(mel, ids), list(_steps(task, mel, ids, len(sound.prompt)))
    *values, whole = fetch(*states.values(), logits).result()
    by = np.concatenate(fetch(*stepped).result())
    named = {path: value[0] for path, value in zip(states, values, strict=True)}
    return Decoded({**named, STEPPED: by}, whole[0], new, by)


def _transcript(task: Transcriber, sound: Sound) -> list[int]:
    """Tokens up to the end, which is one of them, by the steps that transcription captures."""
    session, new = _session(task), list[int]()
    session.listen(sound.samples[None])
    session.start([sound.prompt], 0, timed=False)
    for tokens in session.run(sound.steps):
        new.append(int(tokens[0]))
        if new[-1] == sound.end:
            break
    return new


def _states(task: Transcriber, mel: Tensor, ids: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The spectrogram, and the states after each layer."""
    encoder, decoder = task.model.encoder, task.model.decoder
    yield MEL, mel
    x = encoder.frontend(mel.astype(encoder.dtype))
    yield "encoder.frontend", x
    for i, layer in enumerate(encoder.layers):
        x = layer(x)
        yield f"encoder.layers.{i}", x
    x = encoder.layer_norm(x)
    yield "encoder", x
    memory, y = task.model.memory(x), decoder.embedded(ids)
    yield "decoder.embed_tokens", y
    for i, (block, pair) in enumerate(zip(decoder.layers, memory, strict=True)):
        y = block(y, pair)
        yield f"decoder.layers.{i}", y


def _steps(task: Transcriber, mel: Tensor, ids: Tensor, prompt: int) -> Iterator[Tensor]:
    """Logits [1, vocab] of each step, from a cache: the first reads the prompt."""
    model = task.model
    c, heads = model.config, model.config.decoder_attention_heads
    cache = KVCache(
        1, heads, c.hidden_size // heads, c.max_target_positions, num_layers=c.decoder_layers,
        dtype=model.dtype, device=model.device,
    )  # fmt: skip
    memory = model.memory(model.encode(mel))
    for begin, end in [(0, prompt), *((i, i + 1) for i in range(prompt, ids.shape[1]))]:
        yield model.head(model.decoder(ids[:, begin:end], memory, cache)[:, -1])


def run_speech_reference(folder: Path, sound: Sound) -> Decoded:
    """What the model of transformers gives."""
    theirs, torch = model_of("AutoModelForSpeechSeq2Seq", folder)
    encoder, decoder = theirs.get_encoder(), theirs.get_decoder()
    features: Any = importlib.import_module("transformers").WhisperFeatureExtractor
    extractor = features(feature_size=theirs.config.num_mel_bins)
    mel = extractor(sound.samples, sampling_rate=RATE, padding=False, truncation=False,
                    return_tensors="pt").input_features  # fmt: skip
    states, new, by = {MEL: mel[0].numpy()}, list[int](), list[Array]()

    def keep_input(path: str, module: Any) -> Any:
        def hook(_: object, args: Any, kwargs: Any) -> None:
            states[path] = (args[0] if args else kwargs["hidden_states"])[0].numpy()

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def keep(path: str, module: Any) -> Any:
        def hook(_: object, __: object, output: Any) -> None:
            states[path] = (output[0] if isinstance(output, tuple) else output)[0].numpy()

        return module.register_forward_hook(hook)

    with torch.inference_mode():
        keep_input("encoder.frontend", encoder.layers[0])
        for i, layer in enumerate(encoder.layers):
            keep(f"encoder.layers.{i}", layer)
        keep("encoder", encoder.layer_norm)
        heard = encoder(mel)
        ids, past = torch.tensor([sound.prompt]), None
        named = inspect.signature(theirs.forward).parameters
        kept = "cache" if "cache" in named else "past_key_values"  # before transformers 5.24
        while len(new) < sound.steps and sound.end not in new:
            out = theirs(encoder_outputs=heard, decoder_input_ids=ids, **{kept: past})
            by.append(out.logits[0, -1].numpy())
            new.append(int(by[-1].argmax()))
            ids, past = torch.tensor([new[-1:]]), getattr(out, kept)
        keep_input("decoder.embed_tokens", decoder.layers[0])
        for i, layer in enumerate(decoder.layers):
            keep(f"decoder.layers.{i}", layer)
        read = torch.tensor([[*sound.prompt, *new][:-1]])
        logits = theirs(encoder_outputs=heard, decoder_input_ids=read, use_cache=False).logits
    chosen_by = np.stack(by)
    return Decoded({**states, STEPPED: chosen_by}, logits[0].numpy(), new, chosen_by)
