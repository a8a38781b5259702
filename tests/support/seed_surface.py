"""Every public name of the two systems that set the floor, with ours: a table that is run.

The crates are trueno 0.17 (a batch executor on WebGPU, a cached product) and trueno-gpu 0.4.29
(resident tensors on CUDA). A row is their name, our expression and a check of what that gives;
`tests/docs/test_seed_surface.py` runs the expression as it is written, on every device, and
`tests/support/make_from_trueno.py` writes it on docs/from-trueno.md.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import nn
from tests.nn.test_blocks import WIDTH, stored
from tests.support.foreign import CudaArray, foreign

Array = np.ndarray[Any, Any]
Scene = dict[str, Any]  # the names that an expression may use, and `led`, the ledger around it
Check = Callable[[Scene, Any], None]  # of the scene afterwards and of the expression's value

# Their public names, by the type that has them; functions and types by themselves come last.
THEIRS: dict[str, str] = {
    "GpuCommandBatch": (
        "new upload import_buffer relu scale add sub mul dot sigmoid tanh swish gelu matmul "
        "execute execute_with_cache read wgpu_device wgpu_queue num_operations num_buffers"
    ),
    "GpuMatmulCache": "new upload_weight weight_count weight_bytes matmul_cached",
    "GpuResidentTensor": (
        "from_host new_uninit to_host peek_host is_device_resident h2d_transfers "
        "host_to_device_transfers d2h_transfers device_to_host_transfers kernel_launches len "
        "is_empty size_bytes buffer buffer_mut as_ptr record_kernel_launch"
    ),
    "": (
        "BufferId PipelineCache CachedPipeline batched_multihead_attention "
        "batched_multihead_attention_optimized incremental_attention_gpu "
        "incremental_attention_gpu_async incremental_attention_gpu_with_stream "
        "kv_cache_scatter_gpu clear_kernel_cache kernel_cache_hits kernel_cache_misses "
        "reset_kernel_cache_stats reset_transfer_counters total_h2d_transfers total_h2d_bytes "
        "total_d2h_transfers total_d2h_bytes TransferStats forward_encoder_block_gpu "
        "GpuEncoderBlockWeights GpuEncoderConfig GpuDecoderBlockWeights GpuDecoderConfig "
        "GpuConvFrontendWeights GpuKvCache"
    ),
}


@dataclass(frozen=True)
class Row:
    """One name of theirs.

    Attributes:
        owner: the type that has it; "" for functions and types.
        ours: the statements that do the same; the value of the last one is checked.
        before: statements that come first, not printed.
        only: the kind of device that has it, where not all have; others refuse.
        note: what differs, in a few words.
    """

    owner: str
    name: str
    ours: str
    check: Check
    before: str = ""
    only: str = ""
    note: str = ""


def run(code: str, scene: Scene) -> Any:
    """Run statements; returns the value of the last, where that is an expression."""
    body = ast.parse(code).body
    last = body[-1] if body else None
    if not isinstance(last, ast.Expr):
        exec(code, scene)
        return None
    exec(compile(ast.Module(body[:-1], []), "<a row>", "exec"), scene)
    return eval(compile(ast.Expression(last.value), "<a row>", "eval"), scene)


def near(got: Array, wanted: Any) -> None:
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def says(code: str) -> Check:
    """A check of statements about the scene and `value`, none of which may be False."""

    def check(here: Scene, value: Any) -> None:
        names = {**globals(), **here, "value": value}
        for statement in ast.parse(code).body:
            text = ast.unparse(statement)
            holds = run(text, names)
            assert not isinstance(holds, bool | np.bool_) or holds, text

    return check


# -- what the expressions are about ---------------------------------------------------------------

RANDOM = np.random.default_rng(0)
X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4) / 2
Y = X[::-1] + np.float32(0.25)
W = RANDOM.standard_normal((5, 4), np.float32)
LONG = RANDOM.standard_normal((2, 1000), np.float32)  # theirs is wrong beyond 256 elements
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
Q, K, V = (
    RANDOM.standard_normal((1, heads, 6, HEAD_DIM), np.float32)
    for heads in (HEADS, KV_HEADS, KV_HEADS)
)
ENCODER, DECODER, FRONTEND = (stored(name) for name in ("encoder_post", "decoder_post", "frontend"))


def batch_scene(device: ct.Device) -> Scene:
    batch = device.batch()
    x, y, w = batch.upload(X), batch.upload(Y), batch.upload(W.T)
    return {
        "array": X, "native": foreign(device, X), "batch": batch, "x": x, "y": y, "w": w,
        "h": batch.relu(x), "cache": ct.PipelineCache(), "long": LONG,
    }  # fmt: skip


def matmul_scene(device: ct.Device) -> Scene:
    cache = ct.MatmulCache(device)
    cache.upload_weight("up", W)
    return {"array": X, "weight": W, "cache": cache, "x": ct.asarray(X, device=device)}


def tensor_scene(device: ct.Device) -> Scene:
    x = ct.asarray(X, device=device)
    device.synchronize()
    return {"array": X, "x": x}


def weights_of(arrays: dict[str, Array]) -> dict[str, Array]:
    """The parameters among stored arrays."""
    return {name: array for name, array in arrays.items() if name not in ("x", "y", "memory")}


def function_scene(device: ct.Device) -> Scene:
    q, k, v, x = (ct.asarray(each, device=device) for each in (Q, K, V, X))
    past = ct.KVCache(1, KV_HEADS, HEAD_DIM, 6, device=device)
    past.append(k[:, :, :5], v[:, :, :5])
    device.synchronize()
    return {
        "q": q, "k": k, "v": v, "past": past, "k1": k[:, :, 5:], "v1": v[:, :, 5:],
        "q1": q[:, :, 5:], "x": x, "nn": nn,
        "encoder": weights_of(ENCODER), "decoder": weights_of(DECODER),
        "frontend": weights_of(FRONTEND), "states": ENCODER["x"],
    }  # fmt: skip


SCENES: dict[str, Callable[[ct.Device], Scene]] = {
    "GpuCommandBatch": batch_scene,
    "GpuMatmulCache": matmul_scene,
    "GpuResidentTensor": tensor_scene,
    "": function_scene,
}


def scene_of(row: Row, device: ct.Device) -> Scene:
    """The names that a row may use."""
    return {"ct": ct, "np": np, "device": device, **SCENES[row.owner](device)}


# -- GpuCommandBatch ------------------------------------------------------------------------------


def executed(here: Scene, tensor: ct.Tensor) -> Array:
    here["batch"].execute().result()
    here["led"].expect(submissions=1)
    result: Array = here["batch"].read(tensor)
    return result


def gives(wanted: Any) -> Check:
    """The tensor that was recorded, once its batch has run."""
    return lambda here, value: near(executed(here, value), wanted)


def snapshot(here: Scene, tensor: Any) -> None:
    with pytest.raises(ct.ContractError, match="execute"):
        here["batch"].read(tensor)
    near(executed(here, tensor), X)


def imported(here: Scene, tensor: Any) -> None:
    near(executed(here, here["batch"].add(tensor, tensor)), 2 * X)
    native, (shown, offset) = here["native"], tensor.native
    if isinstance(native, CudaArray):
        assert shown + offset == native.__cuda_array_interface__["data"][0]
    elif isinstance(native, np.ndarray):
        assert np.shares_memory(shown, native)
    else:
        assert shown is native


def one_submission(here: Scene, pending: Any) -> None:
    assert isinstance(pending, ct.Pending)
    assert pending.result() is None
    near(here["batch"].read(here["h"]), np.maximum(X, 0))
    here["batch"].execute().result()  # does not redo the past
    here["led"].expect(submissions=1, uploads=1, launches=1)


def compiled_there(here: Scene, pending: Any) -> None:
    pending.result()
    near(here["batch"].read(here["h"]), np.maximum(X, 0))
    cache = here["cache"]
    assert (len(cache), cache.names()) == (cache.misses, ["relu"] * cache.misses)
    assert cache.misses == (0 if here["device"].name == "cpu" else 1)


def is_read(here: Scene, array: Any) -> None:
    near(array, np.maximum(X, 0))
    array[:] = 7  # a copy that the caller owns
    near(here["batch"].read(here["h"]), np.maximum(X, 0))


def counts(number: int) -> Check:
    def check(here: Scene, value: Any) -> None:
        assert value == number
        here["batch"].execute()
        assert (here["batch"].num_operations, here["batch"].num_buffers) == (1, 4)

    return check


SIGMOID = 1 / (1 + np.exp(-X))
GELU = X * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (X + 0.044715 * X**3)))

BATCH = (
    ("new", "device.batch()",
        says("isinstance(value, ct.CommandBatch); value.device is device; value.num_operations == "
             "value.num_buffers == 0")),
    ("upload", "batch.upload(array)", snapshot),
    ("relu", "batch.relu(x)", gives(np.maximum(X, 0))),
    ("scale", "batch.scale(x, 2.5)", gives(X * 2.5)),
    ("add", "batch.add(x, y)", gives(X + Y)),
    ("sub", "batch.sub(x, y)", gives(X - Y)),
    ("mul", "batch.mul(x, y)", gives(X * Y)),
    ("sigmoid", "batch.sigmoid(x)", gives(SIGMOID)),
    ("tanh", "batch.tanh(x)", gives(np.tanh(X))),
    ("swish", "batch.swish(x)", gives(X * SIGMOID)),
    ("execute", "batch.execute()", one_submission),
    ("execute_with_cache", "batch.execute_with_cache(cache)", compiled_there),
    ("wgpu_device", "batch.native", says("value == device.native")),
    ("num_operations", "batch.num_operations", counts(1)),
    ("num_buffers", "batch.num_buffers", counts(4)),
)  # fmt: skip

ROWS: list[Row] = [Row("GpuCommandBatch", *each) for each in BATCH]
ROWS += [
    Row("GpuCommandBatch", "import_buffer", "batch.import_buffer(native, (3, 4), 'f32')", imported),
    Row("GpuCommandBatch", "dot", "batch.dot(a, b)",
        lambda here, value: near(executed(here, value), LONG[0].astype(np.float64) @ LONG[1]),
        before="a, b = (batch.upload(each) for each in long)", note="right at any length"),
    Row("GpuCommandBatch", "gelu", "batch.gelu(x, 'tanh')", gives(GELU),
        note="the default is the exact GELU"),
    Row("GpuCommandBatch", "matmul", "batch.matmul(x, w)", gives(X @ W.T),
        note="shapes come from the tensors"),
    Row("GpuCommandBatch", "read", "batch.read(h)", is_read, before="batch.execute()"),
    Row("GpuCommandBatch", "wgpu_queue", "batch.native.queue",
        says("value is device.native.queue"), only="webgpu"),
]  # fmt: skip


# -- GpuMatmulCache -------------------------------------------------------------------------------


def product(here: Scene, tensor: Any) -> None:
    near(tensor.numpy(), X @ W.T)
    near(here["cache"].matmul("up", X), X @ W.T)  # and from an array to an array
    with pytest.raises(ct.ShapeError):
        here["cache"].matmul("up", X[:, :3])


ROWS += [
    Row("GpuMatmulCache", "new", "ct.MatmulCache(device)",
        says("isinstance(value, ct.MatmulCache); value.device is device; value.weight_count == "
             "value.weight_bytes == 0")),
    Row("GpuMatmulCache", "upload_weight", "cache.upload_weight('down', weight)",
        says("[(w.name, w.shape) for w in cache.weights()] == [('up', (5, 4)), ('down', (5, "
             "4))]; near(cache.matmul('down', X), X @ W.T)"),
        note="the weight is [out, in], of any storage type"),
    Row("GpuMatmulCache", "weight_count", "cache.weight_count",
        says("value == 1; cache.remove('up'); cache.weight_count == 0")),
    Row("GpuMatmulCache", "weight_bytes", "cache.weight_bytes",
        says("value == sum(w.nbytes for w in cache.weights()) == W.nbytes; cache.remove('up'); "
             "cache.weight_bytes == 0")),
    Row("GpuMatmulCache", "matmul_cached", "cache.matmul('up', x)", product,
        note="x is a tensor, or an array, which gives an array"),
]  # fmt: skip


# -- GpuResidentTensor ----------------------------------------------------------------------------


def is_address(here: Scene, value: Any) -> None:
    native, offset = value
    assert offset % 16 == 0
    if here["device"].name.startswith("cuda"):
        assert isinstance(native, int) and native
    here["led"].expect(downloads=0)


def is_buffer(here: Scene, buffer: Any) -> None:
    if not isinstance(buffer, np.ndarray):
        assert buffer == here["x"].native[0]
    else:
        np.testing.assert_array_equal(buffer.view(np.float32).reshape(-1)[:12], X.reshape(-1))


def changes_in_place(here: Scene, state: Any) -> None:
    memory = state.value.native
    state.assign(state.value * 2.0)
    near(state.numpy(), 2 * X)
    near(here["x"].numpy(), X)  # a tensor never changes
    assert here["device"].name == "cpu" or state.value.native == memory


ROWS += [
    Row("GpuResidentTensor", *each)
    for each in (
        ("from_host", "ct.from_host(array, device=device)",
        says("isinstance(value, ct.Tensor); value.device is device; near(value.numpy(), X); "
             "led.expect(uploads=1, downloads=1)")),
        ("new_uninit", "ct.empty((3, 4), device=device)",
        says("(value.shape, value.dtype, value.device) == ((3, 4), ct.f32, device); "
             "led.expect(uploads=0, launches=0)")),
        ("to_host", "x.to_host()",
        says("np.array_equal(value, X); led.expect(uploads=0, downloads=1, submissions=0)")),
        ("peek_host", "x.peek()",
        says("np.array_equal(value, X); led.expect(downloads=0, peeks=1); x.d2h_transfers == 0")),
        ("is_device_resident", "x.is_resident",
        says("value is True; (x + 1.0).is_resident is not True")),
        ("h2d_transfers", "x.h2d_transfers", says("value == 1")),
        ("host_to_device_transfers", "x.h2d_transfers", says("value == 1")),
        ("size_bytes", "x.size_bytes", says("value == 48")),
        ("buffer", "x.native[0]", is_buffer),
        ("as_ptr", "x.native", is_address),
    )
]  # fmt: skip
ROWS += [
    Row("GpuResidentTensor", "d2h_transfers", "x.d2h_transfers", says("value == 2"),
        before="x.numpy(); x.numpy(); x.peek()"),
    Row("GpuResidentTensor", "device_to_host_transfers", "x.d2h_transfers", says("value == 1"),
        before="x.numpy()"),
    Row("GpuResidentTensor", "kernel_launches", "x.kernel_launches", says("value == 1"),
        before="x = ct.relu(x); x.numpy()", note="counted; theirs always reads 1"),
    Row("GpuResidentTensor", "len", "x.size",
        says("value == 12"), note="len(x) is the first extent"),
    Row("GpuResidentTensor", "is_empty", "x.size == 0", says("value is True"), before="x = x[:0]"),
    Row("GpuResidentTensor", "buffer_mut", "ct.State(x)", changes_in_place,
        note="a tensor never changes, a State does"),
    Row("GpuResidentTensor", "record_kernel_launch", "x.record_launch('mine')",
        says("x.kernel_launches == 1; x.history[-1].what == 'mine'")),
]  # fmt: skip


# -- functions and types --------------------------------------------------------------------------


def attended(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """Attention in float64, heads of keys and values repeated."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        seen = np.tril(np.ones(scores.shape[-2:]), scores.shape[-1] - scores.shape[-2])
        scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result: Array = weights / weights.sum(-1, keepdims=True) @ v
    return result


LAST = attended(Q[:, :, 5:], K, V)  # of the last token over all six


def scattered(here: Scene, value: Any) -> None:
    assert (here["past"].length, here["past"].lengths) == (6, (6,))
    near(here["past"].attend(here["q1"]).numpy(), LAST)
    with pytest.raises(ct.KVCacheFullError, match="6 of 6 positions"):
        here["past"].append(here["k1"], here["v1"])
    here["led"].expect(uploads=0)


def is_kv_cache(here: Scene, cache: Any) -> None:
    assert (cache.capacity, cache.length, cache.device) == (6, 0, here["device"])
    cache.append(here["k"], here["v"])
    near(cache.attend(here["q"]).numpy(), attended(Q, K, V, causal=True))
    cache.truncate(2)
    assert cache.lengths == (2,)


def new_is_a_miss(here: Scene, misses: Any) -> None:
    here["device"].cache.clear()
    for _ in range(2):
        ct.relu(here["x"]).numpy()
    compiled = here["device"].name != "cpu"
    assert here["device"].cache.misses == misses + compiled


def since_then(here: Scene, earlier: Any) -> None:
    """A later total, less one that was kept, counts what happened between."""
    ct.asarray(X, device=here["device"]).numpy()
    spent = ct.totals() - earlier
    assert (spent.uploads, spent.downloads) == (1, 1)


def total(name: str, by: int | None = None) -> Check:
    """One of the process' totals, which grows by what the ledger of this test counts."""

    def check(here: Scene, earlier: Any) -> None:
        (ct.asarray(X, device=here["device"]) + 1.0).numpy()
        grown = getattr(ct.totals(), name) - earlier
        assert grown == getattr(here["led"], name) > 0
        assert by is None or grown == by

    return check


def error_of(got: Array, wanted: Array) -> float:
    return float(np.square(got - wanted).sum() / np.square(wanted).sum())


def encoder_is_loaded(here: Scene, value: Any) -> None:
    here["device"].synchronize()
    names = {name for name, _ in here["block"].named_parameters()}
    assert {"self_attn.qkv.weight", "fc1.bias", "final_layer_norm.weight"} <= names
    y = here["block"](ct.asarray(ENCODER["x"], "f32", here["device"]))
    assert error_of(y.numpy(), ENCODER["y"]) <= 1e-11
    fewer = {name: array for name, array in here["weights"].items() if name != "fc1.weight"}
    with pytest.raises(ct.WeightsError, match=r"missing: fc1\.weight; left over: none"):
        eval(BLOCK).load_parameters(fewer, device=here["device"])


def decoder_is_right(here: Scene, value: Any) -> None:
    block = here.get("block", value)
    if value is not None:
        value.load_parameters(here["weights"], device=here["device"], dtype="f32")
    x, memory = (ct.asarray(DECODER[n], "f32", here["device"]) for n in ("x", "memory"))
    y = block(x, block.encoder_attn.keys_values(memory))
    assert error_of(y.numpy(), DECODER["y"]) <= 1e-11


def encoder_is_right(here: Scene, block: Any) -> None:
    block.load_parameters(here["weights"], device=here["device"], dtype="f32")
    y = block(ct.asarray(ENCODER["x"], "f32", here["device"]))
    assert error_of(y.numpy(), ENCODER["y"]) <= 1e-11


def frontend_is_right(here: Scene, value: Any) -> None:
    y = here["front"](ct.asarray(FRONTEND["x"], "f32", here["device"]))
    assert error_of(y.numpy(), FRONTEND["y"]) <= 1e-11


def is_handle(here: Scene, handle: Any) -> None:
    x = ct.asarray(X, device=here["device"])
    assert isinstance(x, handle)
    batch, other = here["device"].batch(), here["device"].batch()
    waiting = batch.relu(x)
    with pytest.raises(ct.ContractError, match="another batch"):
        other.relu(waiting)
    with pytest.raises(ct.ContractError, match="execute"):
        batch.read(waiting)


def keeps_programs(here: Scene, cache: Any) -> None:
    batch = here["device"].batch()
    y = batch.relu(batch.upload(X))
    batch.execute_with_cache(cache)
    near(batch.read(y), np.maximum(X, 0))
    assert len(cache) == cache.misses == (0 if here["device"].name == "cpu" else 1)


def is_program(here: Scene, kind: Any) -> None:
    calls: list[str] = []

    def compile_() -> str:
        calls.append("compiled")
        return "native"

    cache = ct.PipelineCache()
    first, second = (cache.get(1, "key", "relu", compile_) for _ in range(2))
    assert isinstance(first, kind)
    assert first is second
    assert (first.name, first.key, first.native, calls) == ("relu", "key", "native", ["compiled"])


BLOCK = f"nn.EncoderBlock({WIDTH}, 3, 40, norm_first=False)"
DECODER_BLOCK = f"nn.DecoderBlock({WIDTH}, 3, 40, norm_first=False)"
MELS, POSITIONS = FRONTEND["x"].shape[1], FRONTEND["embed_positions.weight"].shape[0]
WARM = "ct.relu(x).numpy()"


FUNCTIONS = (
    ("BufferId", "ct.Tensor", is_handle),
    ("PipelineCache", "ct.PipelineCache()", keeps_programs),
    ("CachedPipeline", "ct.CachedPipeline", is_program),
    ("clear_kernel_cache", "device.cache.clear()",
        says("len(device.cache) == 0; ct.relu(x).numpy(); led.compiles == (device.name != 'cpu')")),
    ("reset_kernel_cache_stats", "device.cache.reset()",
        says("device.cache.hits == device.cache.misses == 0")),
    ("total_h2d_transfers", "ct.totals().uploads", total("uploads", 1)),
    ("total_h2d_bytes", "ct.totals().upload_bytes", total("upload_bytes")),
    ("total_d2h_transfers", "ct.totals().downloads", total("downloads", 1)),
    ("total_d2h_bytes", "ct.totals().download_bytes", total("download_bytes")),
    ("kv_cache_scatter_gpu", "past.append(k1, v1)", scattered),
)  # fmt: skip
ROWS += [Row("", *each) for each in FUNCTIONS]
ROWS += [
    Row("", "batched_multihead_attention", "ct.attention(q, k, v)",
        says("near(value.numpy(), attended(Q, K, V)); led.expect(uploads=0, downloads=1, "
             "launches=1)"),
        note="one launch, no scores in memory"),
    Row("", "batched_multihead_attention_optimized", "ct.attention(q, k, v, causal=True)",
        says("near(value.numpy(), attended(Q, K, V, causal=True)); led.expect(uploads=0, "
             "downloads=1, launches=1)"), note="masks of four kinds"),
    Row("", "incremental_attention_gpu", "past.append(k1, v1); past.attend(q1)",
        says("near(value.numpy(), LAST); led.expect(uploads=0, downloads=1, submissions=1); "
             "past.lengths == (6,)")),
    Row("", "incremental_attention_gpu_async", "ct.fetch(past.attend(q1))",
        says("isinstance(value, ct.Pending); near(value.result()[0], LAST)"),
        before="past.append(k1, v1)", note="a Pending: result() waits, await works"),
    Row("", "incremental_attention_gpu_with_stream", "with device.stream(): y = past.attend(q1)",
        says("near(y.numpy(), LAST)"), before="past.append(k1, v1)", only="cuda",
        note="any op, on a stream of the application's or a new one"),
    Row("", "kernel_cache_hits", "device.cache.hits",
        says("ct.relu(x).numpy(); device.cache.hits == value + (device.name != 'cpu'); "
             "led.expect(compiles=0)"), before=WARM),
    Row("", "kernel_cache_misses", "device.cache.misses", new_is_a_miss, before=WARM),
    Row("", "reset_transfer_counters", "ct.totals()", since_then,
        note="kept, and subtracted from a later one: nobody resets what others count"),
    Row("", "TransferStats", "ct.totals() - before",
        says("isinstance(value, ct.Counts); (value.uploads, value.downloads) == (1, 1); "
             "value.upload_bytes >= X.nbytes; 'uploads 1' in str(value)"),
        before="before = ct.totals(); ct.asarray(x.numpy(), device=device).native"),
    Row("", "forward_encoder_block_gpu", "block(x)",
        says("error_of(value.numpy(), ENCODER['y']) <= 1e-11; led.expect(launches=7, "
             "submissions=1, uploads=0, downloads=1, copies=0)"),
        before=f"block = {BLOCK}; x = ct.asarray(states, 'f32', device); "
        "block.load_parameters(encoder, device=device, dtype='f32')"),
    Row("", "GpuEncoderBlockWeights", "block.load_parameters(weights, device=device, dtype='f32')",
        encoder_is_loaded, before=f"weights = encoder; block = {BLOCK}"),
    Row("", "GpuEncoderConfig", BLOCK, encoder_is_right, before="weights = encoder"),
    Row("", "GpuDecoderBlockWeights", "block.load_parameters(weights, device=device, dtype='f32')",
        decoder_is_right, before=f"weights = decoder; block = {DECODER_BLOCK}",
        note="with a forward, which theirs lacks"),
    Row("", "GpuDecoderConfig", DECODER_BLOCK, decoder_is_right,
        before="weights = decoder"),
    Row("", "GpuConvFrontendWeights",
        "front.load_parameters(weights, device=device, dtype='f32')", frontend_is_right,
        before=f"weights = frontend; "
        f"front = nn.ConvFrontend({MELS}, {WIDTH}, {POSITIONS})"),
    Row("", "GpuKvCache", f"ct.KVCache(1, {KV_HEADS}, {HEAD_DIM}, 6, device=device)",
        is_kv_cache, note="it owns its length"),
]  # fmt: skip
