"""What a decoder gives: the states after each layer, logits, and a greedy continuation."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from centella.backends.base import Array
from centella.check.report import Quantized, Tokens
from centella.tasks.generate.generator import Generator
from centella.tasks.generate.sampling import SamplingArgs
from centella.tensors.creation import asarray
from centella.tensors.tensor import fetch

CONTINUED = 24  # tokens of the continuation
PROMPT = 24  # of a model without a tokenizer
# Whatever the folder says.
GREEDY: SamplingArgs = {"temperature": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
                        "presence_penalty": 0.0}  # fmt: skip
NEAR = 4.0  # of two tokens whose logits lie so many times as far apart as logits may be off, either


class Decoded(Struct, frozen=True, eq=False):
    """What a decoder gives for one prompt.

    Attributes:
        states: [tokens, hidden], by the path of the module: the embeddings, then each layer.
        logits: [tokens, vocab].
        ids: of the continuation, and the logits [tokens, vocab] that they were chosen by.
    """

    states: dict[str, Array]
    logits: Array
    ids: list[int]
    chosen_by: Array


def prompt_of(task: Generator, text: str) -> Array:
    """Ids [1, tokens] of a text, as many as leave room for the continuation."""
    try:
        ids = list(task.encode(text))
    except (OSError, ValueError):  # no tokenizer: a WeightsError is one
        ids = np.random.default_rng(0).integers(0, task.model.config.vocab_size, PROMPT).tolist()
    return np.array([ids[: max(task.context - CONTINUED, 1)]], np.int32)


def run_decoder(task: Generator, ids: Array) -> Decoded:
    """What a model of ours gives."""
    model, count = task.model, min(CONTINUED, task.context - ids.shape[1])
    tokens = asarray(ids, device=model.device)
    past = model.past(1, ids.shape[1], model.device)
    states = [x[0] for x in model.layer_states(tokens, past)]
    *values, logits = fetch(*states, model(tokens)[0]).result()
    new = task.generate(ids[0].tolist(), max_new_tokens=count, ignore_eos=True, **GREEDY).ids
    whole = np.concatenate([ids[0], np.array(new, np.int32)])[None, :-1]
    by = model(asarray(whole, device=model.device))[0, ids.shape[1] - 1 :].numpy()
    return Decoded(dict(zip(_paths(len(values) - 1), values, strict=True)), logits, list(new), by)


def model_of(kind: str, folder: Path) -> tuple[Any, Any]:
    """A model of transformers in float32, by its class; and torch."""
    torch, transformers = (importlib.import_module(n) for n in ("torch", "transformers"))
    model = getattr(transformers, kind).from_pretrained(
        str(folder), attn_implementation="eager", dtype=torch.float32
    )
    return model.eval(), torch


def run_reference(folder: Path, ids: Array, context: int) -> Decoded:
    """What the model of transformers gives."""
    theirs, torch = model_of("AutoModelForCausalLM", folder)
    layers, last = theirs.get_decoder().layers, {}

    def keep(_: object, __: object, output: Any) -> None:
        last["x"] = output[0] if isinstance(output, tuple) else output

    hook = layers[-1].register_forward_hook(keep)  # `hidden_states` has that after the norm
    with torch.inference_mode():
        tokens = torch.from_numpy(ids.astype(np.int64))
        out = theirs(input_ids=tokens, output_hidden_states=True, use_cache=False)
        hook.remove()
        states = [x[0].numpy() for x in (*out.hidden_states[:-1], last["x"])]
        # By `generate`, since it reads a text again where longrope's frequencies change.
        theirs.generation_config = importlib.import_module("transformers").GenerationConfig(
            max_new_tokens=min(CONTINUED, context - ids.shape[1]), do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        told = theirs.generate(tokens, attention_mask=torch.ones_like(tokens))
    named = dict(zip(_paths(len(layers)), states, strict=True))
    new = told.sequences[0, ids.shape[1] :].tolist()
    by = np.stack([x[0].numpy() for x in told.logits])
    return Decoded(named, out.logits[0].numpy(), new, by)


def _paths(layers: int) -> list[str]:
    return ["embed_tokens", *(f"layers.{i}" for i in range(layers))]


def tokens_of(got: Decoded, expected: Decoded, limit: float) -> Tokens:
    """Compare continuations; two tokens that are about as likely may be exchanged.

    Args:
        limit: sum((got - expected)^2) / sum(expected^2) of logits at most.
    """
    pairs = zip(got.ids, expected.ids, strict=False)
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(expected.ids))
    if equal == len(expected.ids):
        return Tokens(equal, len(expected.ids))
    row, mine, theirs = expected.chosen_by[equal], got.ids[equal], expected.ids[equal]
    apart = float(row[theirs] - row[mine])
    near = NEAR * np.sqrt(limit * np.square(row, dtype=np.float64).mean())
    return Tokens(equal, len(expected.ids), theirs, mine, apart, "" if apart <= near else (
        f"token {equal + 1}: expected {theirs}, got {mine}, whose logit is lower by {apart:.3g}, "
        f"more than {near:.2g}"
    ))  # fmt: skip


def quantized_of(format: str, got: Decoded, whole: Decoded) -> Quantized:
    """What quantising changed: no bound is right for every model, so none is set."""
    errors = {path: _error(x, whole.states[path]) for path, x in got.states.items()}
    p, q = (_log_softmax(logits) for logits in (whole.logits, got.logits))
    equal = next((i for i, (a, b) in enumerate(zip(got.ids, whole.ids, strict=False)) if a != b),
                 len(whole.ids))  # fmt: skip
    return Quantized(
        format, tuple(errors.items()), _error(got.logits, whole.logits),
        float((np.exp(p) * (p - q)).sum(-1).mean()),
        float((p.argmax(-1) == q.argmax(-1)).mean()), equal, len(whole.ids),
    )  # fmt: skip


def _error(got: Array, expected: Array) -> float:
    wide, wanted = got.astype(np.float64), expected.astype(np.float64)
    return float(np.square(wide - wanted).sum() / max(np.square(wanted).sum(), 1e-300))


def _log_softmax(x: Array) -> Array:
    wide = x.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    shifted: Array = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return shifted
