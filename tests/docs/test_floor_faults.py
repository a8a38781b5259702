"""Faults seen in the systems that set the floor: tests that would fail on each.

The scoreboard on docs/from-trueno.md lists all of those faults and where each is tested; these are
the tests that no other file has.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import nn
from tests.support.devices import own
from tests.support.seed_surface import attended

Array = np.ndarray[Any, Any]
TESTS = Path(__file__).parents[1]
REAL = ("cpu", "webgpu", "webgpu-minimum", "cuda", "webgpu-hardware")  # not the simulator: too slow


def random(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


def whole(*shape: int) -> Array:
    """Small integers: their products and sums are exact in f32."""
    return np.random.default_rng(shape).integers(-3, 4, shape).astype(np.float32)


# -- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 1_000_000])
def test_dot_of_every_length(device: ct.Device, n: int) -> None:
    if n > 1000 and device.name == "simulator":
        n = 10_007  # of several passes as well
    a, b = random(2, n)
    batch = device.batch()
    y = batch.dot(batch.upload(a), batch.upload(b))
    batch.execute()
    wanted = a.astype(np.float64) @ b
    bound = 1e-6 * np.linalg.norm(a) * np.linalg.norm(b)
    assert y.shape == ()
    assert abs(batch.read(y) - wanted) <= bound
    ones = ct.full((n,), 1.0, device=device)
    assert ct.dot(ones, ones).item() == n


@pytest.mark.parametrize("k", [1, 5, 33, 257])
def test_one_row_by_a_depth_that_no_vector_divides(device: ct.Device, k: int) -> None:
    """K % 4 is 1; what lies behind the last column of a row is NaN."""
    x, w = whole(1, k), whole(7, k)
    left = ct.asarray(x, device=device)
    rows = np.full((7, k + 3), np.nan, np.float32)
    rows[:, :k] = w
    columns = np.full((k, 7 + 2), np.nan, np.float32)
    columns[:, :7] = w.T
    by_rows = ct.asarray(rows, device=device)[:, :k]
    by_columns = ct.asarray(columns, device=device)[:, :7]
    products = [ct.linear(left, by_rows, variant=v) for v in (None, "gemv", "skinny", "small")]
    products += [ct.linear(left, ct.asarray(w, device=device))]
    products += [ct.matmul(left, by_columns, variant=v) for v in (None, "columns", "small")]
    # Not by BLAS, which looks at what lies behind a row too, and warns of a NaN there.
    wanted = np.einsum("mk,nk->mn", x, w)
    for y in ct.fetch(*products).result():
        np.testing.assert_array_equal(y, wanted, strict=True)


@pytest.mark.devices(*REAL)
@pytest.mark.parametrize("n", [65_535, 65_536, 65_537, 151_936])
def test_more_columns_than_a_grid_has_groups(device: ct.Device, n: int) -> None:
    w = whole(n, 5)
    weight = ct.asarray(w, device=device)
    for m in (1, 3, 9):
        x = whole(m, 5)
        got = ct.linear(ct.asarray(x, device=device), weight).numpy()
        np.testing.assert_array_equal(got, x @ w.T)


@pytest.mark.devices("webgpu-minimum")
def test_a_weight_above_the_largest_binding(device: ct.Device) -> None:
    """140 MB under the limits that WebGPU guarantees: two launches of one program."""
    n, k = 70_000, 1_024
    assert n * k * 2 > device.caps.max_binding == 128 << 20
    x, row = whole(1, k).astype(np.float16), whole(2, k)[1]
    w = np.zeros((n, k), np.float16)
    w[:] = row
    w[:, 0] = np.arange(n) % 5
    with ct.ledger() as led:
        y = ct.linear(ct.asarray(x, device=device), ct.asarray(w, device=device)).numpy()
        led.expect(launches=2, submissions=1, uploads=2, downloads=1)
        assert led.counts.compiles <= 1
    sums = float(x[0, 1:].astype(np.float32) @ row[1:])
    wanted = sums + float(x[0, 0]) * (np.arange(n) % 5)
    np.testing.assert_array_equal(y[0], wanted.astype(np.float16))


@pytest.mark.devices(*REAL)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_edges_of_tiles_at_1500(device: ct.Device, dtype: str) -> None:
    """Whisper's 1500 positions end within a tile of any size; the next head begins behind it."""
    q, k = whole(2, 1500, 24), whole(2, 1500, 24)[::-1].copy()
    a, b = (ct.asarray(x, dtype, device) for x in (q, k))
    got = (a @ b.T).numpy()
    np.testing.assert_array_equal(got, q @ k.swapaxes(1, 2))
    got = (b.T @ a).numpy()
    np.testing.assert_array_equal(got, (k.swapaxes(1, 2) @ q).astype(got.dtype))


@pytest.mark.parametrize("m", [1, 3, 16, 65])
def test_f32_is_never_multiplied_as_f16(device: ct.Device, m: int) -> None:
    """11 bits would make 1 of the first factor, and the second would be infinite."""
    x = np.full((m, 8), 1 + 2.0**-12, np.float32)
    w = np.zeros((9, 8), np.float32)
    w[:, 2] = 131_072.0
    left, right, turned = (ct.asarray(each, device=device) for each in (x, w, w.T))
    products = [left @ turned, ct.linear(left, right, variant="small"), ct.linear(left, right)]
    products += [ct.linear(left, right, variant="skinny")] if m <= 16 else []
    for y in ct.fetch(*products).result():
        np.testing.assert_array_equal(y, x @ w.T)


def test_a_bias_that_is_not_there(device: ct.Device) -> None:
    x, w = random(3, 10), random(6, 10)
    left, right = ct.asarray(x, device=device), ct.asarray(w, device=device)
    zeros = ct.zeros((6,), device=device)
    without = ct.linear(left, right)
    same = ct.linear(left, right, zeros)
    layer = nn.Linear(10, 6, bias=False)
    layer.load_parameters({"weight": w}, device=device)
    np.testing.assert_allclose(without.numpy(), x @ w.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(without.numpy(), same.numpy())
    np.testing.assert_array_equal(without.numpy(), layer(left).numpy())


# -- attention ------------------------------------------------------------------------------------


def test_heads_wider_than_128(device: ct.Device) -> None:
    """Each element of a head counts: none beyond 128 is dropped, in one pass or step by step."""
    dim = 192
    q, k, v = random(1, 4, 5, dim), random(1, 2, 5, dim), random(1, 2, 5, dim)
    wanted = attended(q, k, v, causal=True)
    tensors = [ct.asarray(x, device=device) for x in (q, k, v)]
    first = ct.zeros((1,), "i32", device)  # causal, by the position of the first query
    for variant in ("stream", "split"):
        got = ct.attention(*tensors, starts=first, variant=variant).numpy()
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    cache = ct.KVCache(1, 2, dim, 5, device=device)
    steps = []
    for i in range(5):
        a, b, c = (x[:, :, i : i + 1] for x in tensors)
        cache.append(b, c)
        steps.append(cache.attend(a))
    got = np.concatenate(ct.fetch(*steps).result(), axis=2)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


# -- programs -------------------------------------------------------------------------------------


@pytest.mark.devices("simulator", "webgpu", "cuda")
def test_one_cache_on_two_devices(device: ct.Device) -> None:
    """Each device runs what was compiled for it."""
    cache = ct.PipelineCache()
    x, w = whole(3, 5), whole(4, 5)
    for count, where in enumerate([own(device, cache=cache) for _ in range(2)], start=1):
        for _ in range(2):
            y = ct.linear(ct.asarray(x, device=where), ct.asarray(w, device=where))
            np.testing.assert_array_equal(y.numpy(), x @ w.T)
        assert (len(cache), cache.misses, cache.hits) == (count, count, count)
    assert len(set(cache.names())) == 1


@pytest.mark.devices("webgpu", "cuda")
def test_no_length_compiles_anything(device: ct.Device) -> None:
    """An encoder block over 64 lengths: theirs compiles for each, ours for a few kinds of them."""
    where = own(device)
    square, wide = (16, 16), (24, 16)
    shapes = {f"self_attn.{n}_proj.weight": square for n in ("q", "k", "v", "out")}
    weights = {name: random(*shape) for name, shape in shapes.items()}
    weights |= {"fc1.weight": random(*wide), "fc2.weight": random(*wide[::-1])}
    for layer in ("self_attn", "final"):
        weights[f"{layer}_layer_norm.weight"] = random(16)
        weights[f"{layer}_layer_norm.bias"] = random(16)
    block, same = (nn.EncoderBlock(16, 2, 24, bias=False) for _ in range(2))
    block.load_parameters(weights, device=where)
    same.load_parameters(weights, device="cpu")
    x = random(1, 64, 16)

    def run(layers: nn.EncoderBlock, length: int) -> Array:
        return layers(ct.asarray(x[:, :length], device=layers.device)).numpy()

    for length in (1, 2, 3, 5, 9, 17, 33, 64):
        run(block, length)
    programs = len(where.cache)
    assert programs <= 25  # theirs: 7 for each of the 64
    with ct.forbid("compile"):
        results = [run(block, length) for length in range(1, 65)]
    assert len(where.cache) == programs
    for length in (7, 39):
        np.testing.assert_allclose(results[length - 1], run(same, length), rtol=1e-4, atol=1e-4)


@pytest.mark.devices("cuda")
def test_no_stream_is_made_for_an_op(device: ct.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from centella.backends.cuda.driver import driver

    calls: list[str] = []
    for name in ("cuStreamCreate", "cuStreamCreateWithPriority", "cuStreamDestroy"):
        raw = getattr(driver, name)

        def counted(*args: Any, raw: Callable[..., Any] = raw, name: str = name) -> Any:
            calls.append(name)
            return raw(*args)

        monkeypatch.setattr(driver, name, counted)
    x = ct.asarray(whole(4, 4), device=device)
    for _ in range(5):
        y = ct.softmax(ct.relu(x @ x.T)).numpy()
    np.testing.assert_allclose(y.sum(-1), 1, rtol=1e-5)
    assert calls == []


# -- order ----------------------------------------------------------------------------------------


def test_copies_are_ordered_with_kernels(device: ct.Device) -> None:
    """Inputs that a replay copies, and memory that uploads reuse, with nobody waiting between."""
    side = 8 if device.name == "simulator" else 160
    rounds = 3 if device.name == "simulator" else 20
    w = whole(side, side)
    weight = ct.asarray(w, device=device)
    step = device.compile(lambda x: x @ weight, np.zeros((side, side), np.float32))
    replayed, uploaded = [], []
    for i in range(rounds):
        x = ct.full((side, side), float(i), device=device)
        replayed.append((step(x) + 0.0) if i % 2 else step(x).copy())
        device.recorder.flush()
        y = ct.asarray(np.full((side, side), i, np.float32), device=device)
        uploaded.append(y @ weight)
        device.recorder.flush()
        del x, y  # their memory is the next round's
    for i, (a, b) in enumerate(zip(replayed, uploaded, strict=True)):
        wanted = np.full((side, side), i, np.float32) @ w
        np.testing.assert_array_equal(a.numpy(), wanted)
        np.testing.assert_array_equal(b.numpy(), wanted)


# -- checks ---------------------------------------------------------------------------------------


def fused_mistakes(device: ct.Device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Operands that fit but for one extent, for each op that fuses several."""

    def z(*shape: int) -> ct.Tensor:
        return ct.zeros(shape, device=device)

    x, w = z(3, 8), z(6, 8)
    yield "weight", lambda: ct.linear(x, z(6, 7))
    yield "bias", lambda: ct.linear(x, w, z(5))
    yield "bias of rank 2", lambda: ct.linear(x, w, z(6, 1))
    yield "residual", lambda: ct.linear(x, w, z(6), activation="gelu", residual=z(3, 5))
    yield "norm weight", lambda: ct.layer_norm(x, z(7), z(8))
    yield "norm bias", lambda: ct.layer_norm(x, z(8), z(9))
    yield "rms weight", lambda: ct.rms_norm(x, z(4))
    q, k = z(1, 4, 3, 16), z(1, 2, 5, 16)
    yield "heads", lambda: ct.attention(q, z(1, 3, 5, 16), z(1, 3, 5, 16))
    yield "head size", lambda: ct.attention(q, z(1, 2, 5, 8), k)
    yield "keys and values", lambda: ct.attention(q, k, z(1, 2, 4, 16))
    yield "mask", lambda: ct.attention(q, k, k, mask=z(1, 1, 3, 4))
    yield "channels", lambda: ct.conv1d(z(1, 4, 9), z(2, 3, 3))
    yield "convolution bias", lambda: ct.conv1d(z(1, 4, 9), z(2, 4, 3), z(3))
    yield "gate", lambda: ct.silu_gate(z(3, 7), z(3, 6))


def test_shapes_are_checked_in_fused_ops(device: ct.Device) -> None:
    for what, call in fused_mistakes(device):
        with pytest.raises(ct.ShapeError, match="expected"):
            call()
            pytest.fail(what)
    x = ct.full((2, 3), 2.0, device=device)
    np.testing.assert_array_equal((x * 3.0).numpy(), np.full((2, 3), 6.0))


# -- the tests themselves -------------------------------------------------------------------------


def is_check(node: ast.AST) -> bool:
    """Whether a statement or call compares something: more than that there is a result."""
    if isinstance(node, ast.Assert):
        return not is_weak(node.test)
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Attribute) and called.attr in ("raises", "expect", "fail"):
        return True
    return isinstance(called, ast.Attribute) and called.attr.startswith("assert_")


def is_weak(test: ast.expr) -> bool:
    """`assert x`, `assert len(x)`, `is not None`, `len(x) > 0`, `isfinite(x).all()`."""
    if isinstance(test, ast.Name | ast.Attribute):
        return True
    if isinstance(test, ast.Call):
        of = ast.unparse(test.func)
        return of == "len" or (of.endswith(".all") and "isfinite(" in of)
    if isinstance(test, ast.Compare):
        least = isinstance(test.ops[0], ast.IsNot | ast.Gt | ast.NotEq)
        right = test.comparators[0]
        return least and isinstance(right, ast.Constant) and right.value in (None, 0, "")
    return False


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> dict[str, Function]:
    """Every function of a file; those of a class as `TestThis.test_that`."""
    by_name: dict[str, Function] = {}

    def visit(node: ast.AST, of: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                by_name[of + child.name] = child
            visit(child, f"{child.name}." if isinstance(child, ast.ClassDef) else of)

    visit(ast.parse(path.read_text("utf-8")), "")
    return by_name


def called(node: ast.AST) -> set[str]:
    """Names of what is called, or handed on to be called."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
    }


RAISING = {  # what they call raises by itself
    "test_layers::test_the_arrows_have_no_circle",
}


def test_every_test_compares_something() -> None:
    """By itself, or by a helper of its file or of one that it imports: never by another test."""
    paths = sorted(TESTS.rglob("*.py"))
    by_file = {p.stem: functions(p) for p in paths}
    near = {p.stem: [p.stem, *re.findall(r"from tests\.\w+\.(\w+) import", p.read_text("utf-8"))]
            for p in paths}  # fmt: skip
    every = {(file, name): node for file in by_file for name, node in by_file[file].items()}
    tests = {key for key in every if key[1].rpartition(".")[2].startswith("test_")}
    uses = {key: called(node) for key, node in every.items()}
    checking = {key for key, node in every.items() if any(map(is_check, ast.walk(node)))}

    def helped(file: str, name: str) -> bool:
        helpers = (key for key in checking - tests if key[0] in near[file])
        return any(helper.rpartition(".")[2] in uses[file, name] for _, helper in helpers)

    while more := {key for key in every.keys() - checking if helped(*key)}:
        checking |= more
    assert len(tests) > 800
    assert {"::".join(key) for key in tests - checking} == RAISING


@pytest.mark.parametrize(
    ("line", "checks"),
    [
        ("assert y", False),
        ("assert y.size", False),
        ("assert len(y)", False),
        ("assert len(y) > 0", False),
        ("assert y is not None", False),
        ("assert np.isfinite(y).all()", False),
        ("assert y.shape == (3,)", True),
        ("assert np.array_equal(y, x)", True),
        ("np.testing.assert_array_equal(y, x)", True),
    ],
)
def test_a_test_that_finds_something_there_is_none(line: str, checks: bool) -> None:
    assert any(map(is_check, ast.walk(ast.parse(line)))) is checks
