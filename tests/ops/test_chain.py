"""`linear_chain`: one launch whose groups meet, and the products that it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import centella as ct
from centella.dtypes import DType, bf16, dtype_of, f16, f32
from centella.errors import LimitError, ShapeError
from centella.op.form import Form, named
from centella.op.variant import FORCED
from centella.ops.matmul import chain
from centella.ops.matmul.chain import CHAIN, GIVEN, ChainAttrs, Link
from centella.ops.matmul.chain_choice import lower, tile_of
from centella.simulator.run import simulate
from centella.specs import Caps, make_spec
from centella.tensors.functional.chain import ChainLink, linear_chain
from tests.emit.test_lang_ptx import assemble_clean, needs_ptxas
from tests.support.lang_common import ORDERS, Tensor
from tests.support.launched import laid_out, op_form, parameters, rounded, traced
from tests.support.mutations import mistakes

Array = np.ndarray[Any, Any]
CUDA = Caps("ptx", max_storage_buffers=64, max_workgroup=128, max_shared=64 << 10, subgroups=True,
            native_f16_pack=True, arch="sm_90a", family="nvidia", processors=3)  # fmt: skip
H200 = replace(CUDA, max_workgroup=1024, max_shared=227 << 10, processors=132)
LAYER = (Link(residual=GIVEN, alpha=0.5), Link(norm=True, gate="silu", eps=1e-3),
         Link(residual=0, kept=True), Link(norm=True, bias=True))  # fmt: skip
CASES: dict[str, tuple[tuple[int, ...], tuple[Link, ...], str]] = {
    "a layer": ((64, 24, 48, 24, 10), LAYER, ""),
    "one link": ((8, 2), (Link(),), ""),
    "logits": ((264, 70), (Link(norm=True, bias=True),), "f32"),
    "rows over warps": ((24, 16, 2048, 16, 4), LAYER, "f32"),
    "uneven": ((2056, 8, 4), (Link(kept=True), Link(gate="relu")), ""),  # chunks of threads
}  # fmt: skip


def operands(
    widths: tuple[int, ...], links: tuple[Link, ...], dtype: DType, seed: int = 0
) -> list[tuple[Array, DType]]:
    """x, the residual, and each link's own; sums near 1."""
    random = np.random.default_rng(seed)
    given = [(random.standard_normal((1, widths[0])), dtype)]
    for n, link in zip(widths[1:], links, strict=True):
        if link.residual == GIVEN:
            given.append((random.standard_normal((1, n)), dtype))
    for k, n, link in zip(widths, widths[1:], links, strict=False):
        rows = 2 * n if link.gate else n
        given.append((random.standard_normal((rows, k)) / k**0.5, dtype))
        given += [(random.random(k) + 0.5, f32)] * link.norm
        given += [(random.standard_normal(n), f32)] * link.bias
    return given


def formed(
    given: list[tuple[Array, DType]], links: tuple[Link, ...], dtype: str = "", **more: Any
) -> Form[ChainAttrs]:
    inputs = tuple(make_spec(a.shape, d, 16) for a, d in given)
    attrs = {"links": links, "dtype": dtype, **more}
    outputs = CHAIN.rule(inputs, ChainAttrs(**attrs))
    return op_form(CHAIN, inputs, tuple(make_spec(s, d, 16) for s, d in outputs), attrs)


def launched(form: Form[ChainAttrs], given: list[tuple[Array, DType]], **how: Any) -> list[Array]:
    """The results of its one launch in the simulator; `ir`: of this kernel."""
    lowered = lower(form, how.pop("caps", CUDA))
    (call,) = lowered.calls
    specs = [*form.inputs, *form.outputs, *lowered.temporaries]
    values = [a for a, _ in given] + [None] * (len(specs) - len(given))
    words = [laid_out(a, s) for a, s in zip(values, specs, strict=True)]
    ir = how.pop("ir", None) or traced(call)
    bound = [words[r.index] for r in call.tensors]
    simulate(ir, bound, parameters(call, ir), call.groups, **how)
    first = len(form.inputs)
    return [Tensor(w, s.dtype, s.shape, s.strides, 0).numpy()
            for w, s in zip(words[first:], form.outputs, strict=False)]  # fmt: skip


def formula(form: Form[ChainAttrs], given: list[tuple[Array, DType]]) -> list[Array]:
    """The same in float64."""
    attrs = {k: v for k, v in named(form.attrs).items() if k != "variant"}
    result = CHAIN.reference(*(rounded(a, d) for a, d in given), **attrs)
    return list(result) if isinstance(result, tuple) else [result]


def close(got: list[Array], wanted: list[Array], dtype: DType) -> bool:
    near = {"f16": 2e-3, "bf16": 1.2e-2, "f32": 1e-5}[dtype.name]
    return all(
        bool(np.abs(a - b).max() <= near * np.abs(b).max())
        for a, b in zip(got, wanted, strict=True)
    )


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_one_launch_gives_what_the_products_give(name: str, dtype: DType) -> None:
    widths, links, last = CASES[name]
    given = operands(widths, links, dtype)
    form = formed(given, links, last, variant="resident")
    for order in ORDERS if name == "a layer" else ORDERS[:1]:
        got = launched(form, given, order=order)
        assert close(got, formula(form, given), dtype)
    few = launched(form, given, caps=replace(CUDA, processors=12))  # groups without rows
    assert close(few, formula(form, given), dtype)
    if last:
        assert close(got[-1:], formula(form, given)[-1:], f32)


def test_each_link_of_rows_apart_is_its_product() -> None:
    """More rows, and dtypes that the one launch does not take, are launches of their own."""
    widths, links, _ = CASES["a layer"]
    for caps, dtype, launches in ((CUDA, f32, 5), (replace(CUDA, processors=0), bf16, 5)):
        form = formed(operands(widths, links, dtype), links)
        assert tile_of(form, caps) is None
        lowered = lower(form, caps)
        assert len(lowered.calls) == launches  # four links, and a result that is kept
    assert len(lower(formed(operands(widths, links, bf16), links), CUDA).calls) == 1
    with pytest.raises(LimitError, match="linear_chain of 4 links: variant 'resident'"):
        lower(formed(operands(widths, links, f32), links, variant="resident"), CUDA)


def test_a_thread_without_waits_or_a_group_without_meetings_is_seen() -> None:
    """Each barrier, wait and meeting is needed: without it there is a fault, or another result."""
    widths, links, _ = CASES["a layer"]
    given = operands(widths, links, bf16)
    form = formed(given, links, variant="resident")
    ir = traced(lower(form, CUDA).calls[0])
    wanted = formula(form, given)
    missed = []
    for mistake in mistakes(ir):
        if not mistake.label.startswith("no "):
            continue
        try:
            got = launched(form, given, ir=mistake.of(ir), order="shuffled")
        except ct.errors.SimulationError:
            continue
        if close(got, wanted, bf16):
            missed.append(mistake.label)
    assert not missed


SHAPES = {  # of Qwen3: heads, states, network, q k and v
    "4B": (4096, 2560, 9728, 6144), "0.6B": (2048, 1024, 3072, 4096),
    "8B": (4096, 4096, 12288, 6144),
}  # fmt: skip


def shaped(heads: int, width: int, inner: int, qkv: int) -> Form[ChainAttrs]:
    links = (Link(residual=GIVEN), Link(norm=True, gate="silu"), Link(residual=0, kept=True),
             Link(norm=True))  # fmt: skip
    shapes = ((1, heads), (1, width), (width, heads), (2 * inner, width), (width,), (width, inner),
              (qkv, width), (width,))  # fmt: skip
    inputs = tuple(make_spec(s, f32 if len(s) == 1 else bf16, 16) for s in shapes)
    outputs = CHAIN.rule(inputs, ChainAttrs(links))
    return op_form(CHAIN, inputs, tuple(make_spec(s, d, 16) for s, d in outputs), {"links": links})


@pytest.mark.parametrize("name", SHAPES)
@needs_ptxas
def test_kernels_of_real_layers_assemble(name: str, tmp_path: Path) -> None:
    """Without spills; a ring is most of a multiprocessor's memory, so that weights never wait."""
    form = shaped(*SHAPES[name])
    tile = tile_of(form, H200)
    assert tile is not None and tile.groups == 132 and tile.threads == 512
    row = tile.chunks * tile.threads * 16
    assert tile.ring * row > 190 << 10
    ir = traced(lower(form, H200).calls[0])
    assert ir.shared_bytes <= H200.max_shared and ir.meets
    text = assemble_clean(ir, "sm_90a", tmp_path)
    assert text.count("atom.acq_rel.gpu") == 3


def test_one_launch_is_off_until_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded where it is forced and fits, or where the target is among those that it suits."""
    op, form = CHAIN, shaped(*SHAPES["0.6B"])
    forced = replace(form, attrs=replace(form.attrs, variant="resident"))
    h200 = replace(H200, max_binding=1 << 40)
    assert op.preferred is not None
    assert not op.preferred(form, h200) and op.preferred(forced, h200)
    for caps in (replace(h200, processors=0), replace(h200, max_binding=1 << 20)):
        assert not op.preferred(forced, caps)
    single = formed(operands((8, 2), (Link(),), bf16), (Link(),), variant="resident")
    assert not op.preferred(single, h200)
    monkeypatch.setattr(chain, "FASTER", {"sm_90a"})
    assert op.preferred(form, h200) and not op.preferred(form, replace(h200, arch="sm_80"))


def test_operands_that_do_not_fit() -> None:
    widths, links, _ = CASES["a layer"]
    specs = [make_spec(a.shape, d, 16) for a, d in operands(widths, links, bf16)]
    cases = {
        "expected 9 operands": (specs[:-1], links),
        r"link 0: expected a weight \[n, 64\]": ([*specs[:2], specs[3], *specs[3:]], links),
        "link 3: expected bias": ([*specs[:-1], make_spec((3,), f32, 16)], links),
        "has no residual 2": (specs, (*links[:2], replace(links[2], residual=2), links[3])),
        r"link 0: expected a residual \[1, 24\]": ([specs[0], specs[0], *specs[2:]], links),
    }
    for text, (given, changed) in cases.items():
        with pytest.raises(ShapeError, match=text):
            CHAIN.rule(tuple(given), ChainAttrs(changed))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_function_is_one_chain_or_products(
    device: ct.Device, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row and several of a layer on each device, as links and as results."""
    monkeypatch.setitem(FORCED, "linear_chain", "resident")  # where it fits
    random = np.random.default_rng(3)
    kind = dtype_of(dtype)

    def of(*shape: int) -> ct.Tensor:
        return ct.asarray(random.standard_normal(shape).astype(np.float32), device=device)

    for rows in (1, 3):
        x, residual = of(rows, 64).astype(kind), of(rows, 32).astype(kind)
        weights = [w.astype(kind) for w in (of(32, 64) * 0.1, of(96, 32) * 0.1, of(32, 48) * 0.1)]
        norm = of(32)
        links = [
            ChainLink(weights[0], residual="x"),
            ChainLink(weights[1], norm, 1e-3, gate="gelu"),
            ChainLink(weights[2], residual=0, kept=True),
            ChainLink(weights[1], norm),
        ]
        state, last = linear_chain(x, links, residual)
        first = ct.linear(x, weights[0], residual=residual)
        inner = ct.normed_linear(first, weights[1], norm, eps=1e-3, gate="gelu")
        wanted = ct.linear(inner, weights[2], residual=first)
        near = {"f32": 1e-5, "f16": 1e-2, "bf16": 8e-2}[dtype]
        for got, right in ((state, wanted), (last, ct.normed_linear(wanted, weights[1], norm))):
            a, b = (t.astype("f32").numpy() for t in (got, right))
            assert got.dtype is kind and np.abs(a - b).max() <= near * np.abs(b).max()
