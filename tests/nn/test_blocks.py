"""Blocks of `nn` against PyTorch's in float64; the ledger: no copy, stated launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import centella as ct
from centella import nn

DATA = Path(__file__).parents[1] / "data"
WIDTH, HEADS, INNER = 24, 3, 40
BOUND = {"f32": 1e-11, "f16": 1e-5, "bf16": 3e-4}  # of the squared error over a whole block
DTYPES = ("f32", "f16", "bf16")

Arrays = dict[str, np.ndarray[Any, Any]]
M = TypeVar("M", bound=nn.Module)


def stored(name: str) -> Arrays:
    with np.load(DATA / f"block_{name}.npz") as file:
        return {key: file[key] for key in file.files}


def loaded(module: M, arrays: Arrays, device: ct.Device, dtype: str) -> M:
    weights = {n: a for n, a in arrays.items() if n not in ("x", "y", "memory")}
    module.load_parameters(weights, device=device, dtype=dtype)
    return module


def given(arrays: Arrays, name: str, device: ct.Device, dtype: str) -> ct.Tensor:
    tensor = ct.asarray(arrays[name], device=device).astype(dtype)
    ct.fetch(tensor).result()
    return tensor


def check(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], dtype: str) -> None:
    assert got.shape == wanted.shape
    error = np.square(got.astype(np.float64) - wanted).sum() / np.square(wanted).sum()
    assert error <= BOUND[dtype], error


UNBIASED = ("k_proj",)  # Whisper's keys have no bias


def encoder(name: str) -> nn.EncoderBlock:
    if name == "encoder_pre":
        return nn.EncoderBlock(WIDTH, HEADS, INNER, unbiased=UNBIASED)
    return nn.EncoderBlock(WIDTH, HEADS, INNER, norm_first=False)


def decoder(name: str, device: ct.Device, dtype: str) -> tuple[Arrays, nn.DecoderBlock, ct.Tensor]:
    """What is stored, the block with its weights, and the keys and values of the memory."""
    arrays, first = stored(name), name == "decoder_pre"
    block = nn.DecoderBlock(
        WIDTH, HEADS, INNER, norm_first=first, unbiased=UNBIASED if first else ()
    )
    loaded(block, arrays, device, dtype)
    both = block.encoder_attn.keys_values(given(arrays, "memory", device, dtype))
    ct.fetch(*both).result()
    return arrays, block, both


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["encoder_pre", "encoder_post"])
def test_encoder_block(device: ct.Device, name: str, dtype: str) -> None:
    arrays = stored(name)
    block = loaded(encoder(name), arrays, device, dtype)
    x = given(arrays, "x", device, dtype)
    with ct.ledger() as led:
        y = block(x)
        # norm, q k v, attention, out + residual, norm, up + GELU, down + residual
        led.expect(launches=7, submissions=1, uploads=0, downloads=0, copies=0)
    check(y.numpy(), arrays["y"], dtype)


@pytest.mark.parametrize("name", ["encoder_pre", "encoder_post"])
def test_padding_changes_nothing(device: ct.Device, name: str) -> None:
    arrays = stored(name)
    block = loaded(encoder(name), arrays, device, "f32")
    x = arrays["x"].copy()
    lengths = ct.asarray(np.array([x.shape[1], 4], np.int32), device=device)
    short = block(ct.asarray(x[1:, :4].copy(), device=device)).numpy()
    x[1, 4:] = 1e4
    got = block(ct.asarray(x, device=device), lengths=lengths).numpy()
    check(got[:1], arrays["y"][:1], "f32")
    check(got[1:, :4], short.astype(np.float64), "f32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["decoder_pre", "decoder_post"])
def test_decoder_block(device: ct.Device, name: str, dtype: str) -> None:
    arrays, block, both = decoder(name, device, dtype)
    x = given(arrays, "x", device, dtype)
    with ct.ledger() as led:
        y = block(x, both)
        # norm, q k v, attention, out; norm, q, attention, out; norm, up, down
        led.expect(launches=11, submissions=1, uploads=0, downloads=0, copies=0)
    check(y.numpy(), arrays["y"], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["decoder_pre", "decoder_post"])
def test_a_decoder_block_step_by_step(device: ct.Device, name: str, dtype: str) -> None:
    arrays, block, both = decoder(name, device, dtype)
    batch, length, _ = arrays["x"].shape
    cache = ct.KVCache(batch, HEADS, WIDTH // HEADS, length, dtype=dtype, device=device)
    x = given(arrays, "x", device, dtype)
    rows = [block(x[:, :3], both, cache=cache)]
    rows += [block(x[:, i : i + 1], both, cache=cache) for i in range(3, length)]
    check(np.concatenate(ct.fetch(*rows).result(), 1), arrays["y"], dtype)
    assert cache.lengths == (length,) * batch
    with pytest.raises(ct.KVCacheFullError):
        block(x[:, :1], both, cache=cache)


@pytest.mark.parametrize("name", ["decoder_pre", "decoder_post"])
def test_a_decoder_step_is_replayed(device: ct.Device, name: str) -> None:
    arrays, block, both = decoder(name, device, "f32")
    batch, length, width = arrays["x"].shape
    cache = ct.KVCache(batch, HEADS, WIDTH // HEADS, length, device=device)
    step = device.compile(
        lambda x: block(x, both, cache=cache), np.zeros((batch, 1, width), np.float32)
    )
    rows = []
    for i in range(length):
        with ct.ledger() as led, ct.forbid("compile", "allocation"):
            y = step(np.ascontiguousarray(arrays["x"][:, i : i + 1]))
            led.expect(submissions=1, uploads=1, launches=step.launches, copies=0, plans=0)
        rows.append(y.numpy())
    # Positions, K and V written, and an attention over the cache beside a step's own 11; fewer
    # where a launch costs something, and norms, products and what follows are one.
    few = {"decoder_pre": 9, "decoder_post": 12}[name]
    assert step.launches == (13 if device.caps.launches_are_free else few)
    check(np.concatenate(rows, 1), arrays["y"], "f32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_frontend(device: ct.Device, dtype: str) -> None:
    arrays = stored("frontend")
    mels, positions = arrays["x"].shape[1], arrays["embed_positions.weight"].shape[0]
    front = loaded(nn.ConvFrontend(mels, WIDTH, positions), arrays, device, dtype)
    x = given(arrays, "x", device, dtype)
    with ct.ledger() as led:
        y = front(x)
        # twice: padded with channels last, product + GELU (a formula on the CPU); the positions
        launches = 3 if device.caps.target == "numpy" else 5
        led.expect(launches=launches, submissions=1, uploads=0, downloads=0, copies=0)
    check(y.numpy(), arrays["y"], dtype)


def test_mistakes(device: ct.Device) -> None:
    with pytest.raises(ct.ShapeError, match="SelfAttention: expected 5 heads to divide 24"):
        nn.EncoderBlock(24, 5, 40)
    with pytest.raises(ct.ShapeError, match="expected num_kv_heads to divide 4, got 3"):
        nn.SelfAttention(24, 4, num_kv_heads=3)
    with pytest.raises(ct.ShapeError, match="SelfAttention: expected num_heads of 1 or more"):
        nn.SelfAttention(24, 0)
    with pytest.raises(ct.ShapeError, match="SelfAttention: expected num_kv_heads of 1 or more"):
        nn.SelfAttention(24, 4, num_kv_heads=0)
    with pytest.raises(ct.ShapeError, match="CrossAttention: expected num_heads of 1 or more"):
        nn.CrossAttention(24, 0)
    _, block, memory = decoder("decoder_pre", device, "f32")
    cache = ct.KVCache(2, HEADS, WIDTH // HEADS, 4, device=device)
    x, lengths = ct.zeros((2, 1, WIDTH), device=device), ct.full((2,), 1, "i32", device)
    with pytest.raises(ct.ShapeError, match="expected lengths or a cache, got both"):
        block(x, memory, cache=cache, lengths=lengths)
    assert cache.lengths == (0, 0)
    arrays = stored("frontend")
    mels, positions = arrays["x"].shape[1], arrays["embed_positions.weight"].shape[0]
    front = loaded(nn.ConvFrontend(mels, WIDTH, positions), arrays, device, "f32")
    with pytest.raises(ct.ShapeError, match=rf"ConvFrontend: expected up to {2 * positions} frame"):
        front(ct.zeros((1, mels, 2 * positions + 1), device=device))
    arrays = stored("encoder_post")
    del arrays["self_attn.k_proj.bias"]
    with pytest.raises(ct.WeightsError, match=r"missing: self_attn\.k_proj\.bias"):
        loaded(encoder("encoder_post"), arrays, device, "f32")
    arrays = stored("encoder_post")
    with pytest.raises(ct.WeightsError, match=r"left over: self_attn\.k_proj\.bias"):
        loaded(encoder("encoder_pre"), arrays, device, "f32")
