"""Transformer blocks of transformers (Whisper, BART), small and random, in float64."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from transformers import BartConfig, WhisperConfig
from transformers.models.bart.modeling_bart import BartDecoderLayer, BartEncoderLayer
from transformers.models.whisper.modeling_whisper import (
    WhisperDecoderLayer,
    WhisperEncoder,
    WhisperEncoderLayer,
)

WIDTH, HEADS, INNER = 24, 3, 40
BATCH, LENGTH, MEMORY = 2, 7, 9
MELS, FRAMES = 10, 13

Arrays = dict[str, np.ndarray[Any, Any]]


def _filled(module: torch.nn.Module, generator: torch.Generator) -> torch.nn.Module:
    """The module in float64 with weights of a usual size, biases and norms included."""
    module = module.double().eval()
    with torch.no_grad():
        for name, value in module.named_parameters():
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            value.copy_((noise * 0.2 + centre).float().double())
    return module


def _rand(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).float().double()


def _output(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _called(layer: torch.nn.Module, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
    known = inspect.signature(layer.forward).parameters
    return _output(layer(x, **{n: v for n, v in arguments.items() if n in known}))


def _causal(length: int) -> torch.Tensor:
    mask = torch.full((length, length), -torch.inf, dtype=torch.float64)
    return mask.triu(1)[None, None]


def blocks() -> dict[str, Arrays]:
    """Weights, inputs and outputs of each block, by name."""
    generator = torch.Generator().manual_seed(20)
    sizes = {
        "d_model": WIDTH, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER, "dropout": 0.0,
        "attention_dropout": 0.0, "activation_dropout": 0.0, "activation_function": "gelu",
    }  # fmt: skip
    whisper = WhisperConfig(
        **sizes, num_mel_bins=MELS, max_source_positions=(FRAMES + 1) // 2, encoder_layers=1
    )
    bart = BartConfig(**sizes)
    whisper._attn_implementation = bart._attn_implementation = "eager"
    results: dict[str, Arrays] = {}
    for name, layer in (
        ("encoder_pre", WhisperEncoderLayer(whisper)),
        ("encoder_post", BartEncoderLayer(bart)),
        ("decoder_pre", WhisperDecoderLayer(whisper, layer_idx=0)),
        ("decoder_post", BartDecoderLayer(bart, layer_idx=0)),
    ):
        module = _filled(layer, generator)
        x, memory = _rand(generator, BATCH, LENGTH, WIDTH), _rand(generator, BATCH, MEMORY, WIDTH)
        arguments: dict[str, Any] = {"attention_mask": None}
        if "decoder" in name:
            arguments = {"attention_mask": _causal(LENGTH), "encoder_hidden_states": memory,
                     "encoder_attention_mask": None, "use_cache": False}  # fmt: skip
        with torch.no_grad():
            y = _called(module, x, **arguments)
        results[name] = _arrays(module, {"x": x, "memory": memory, "y": y})
    encoder = WhisperEncoder(whisper)
    front = _filled(encoder, generator)
    mel = _rand(generator, BATCH, MELS, FRAMES)
    with torch.no_grad():
        gelu = torch.nn.functional.gelu
        y = gelu(front.conv2(gelu(front.conv1(mel)))).permute(0, 2, 1)
        y = y + front.embed_positions.weight[: y.shape[1]]
    arrays = _arrays(front, {"x": mel, "y": y})
    kept = ("conv1", "conv2", "embed_positions", "x", "y")
    results["frontend"] = {n: a for n, a in arrays.items() if n.partition(".")[0] in kept}
    return results


def _arrays(module: torch.nn.Module, states: dict[str, torch.Tensor]) -> Arrays:
    arrays = {n: v.detach().numpy().astype(np.float32) for n, v in module.named_parameters()}
    for name, value in states.items():
        arrays[name] = value.numpy().astype(np.float64 if name == "y" else np.float32)
    return arrays
