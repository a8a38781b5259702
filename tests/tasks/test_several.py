"""Models on several devices: the same results in the same order, also where a device fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella import nn
from centella.backends import opening
from centella.errors import (
    CompileError,
    ContractError,
    DeviceError,
    DeviceLostError,
    DTypeError,
    LimitError,
    ShapeError,
    WeightsError,
)
from centella.tasks.embed.embedder import Embedder
from centella.tasks.text import several
from centella.tasks.text.batches import Batch
from tests.support.model_common import DATA
from tests.tasks.test_classify import WORDS, with_tokenizer

pytest.importorskip("tokenizers")
TINY = DATA / "tiny-bert"
TEXTS = [f"storm {'river ' * (i % 11)}{i}" for i in range(60)]


def cpu() -> ct.Device:
    """One of its own."""
    return ct.device("cpu", memory_limit="2 GB")


def two(*devices: Any) -> Embedder:
    return ct.load(TINY, devices=devices or (cpu(), cpu()), task="embed")


def fail(replica: Any, error: Exception) -> list[int]:
    """Make a replica fail; the sizes of batches that it got."""
    sizes: list[int] = []

    def failing(batch: Batch, *_: Any) -> Any:
        sizes.append(len(batch.rows))
        raise error

    vars(replica)["_submit"] = failing
    return sizes


def met(model: Any, error: BaseException | None = None, after: int = 0) -> list[list[int]]:
    """Make the first device wait until the last had a batch or failed; what each ran, by sizes.

    Args:
        error: what the last device fails with, from a batch on.
    """
    replicas = (model, *model.replicas)
    go_on = threading.Event()
    ran: list[list[int]] = [[] for _ in replicas]

    def watch(replica: Any, sizes: list[int], error: BaseException | None) -> None:
        submit = replica._submit

        def submitted(batch: Batch, *rest: Any) -> Any:
            if replica is replicas[0]:
                assert go_on.wait(30)
            elif error is None or len(sizes) >= after:
                go_on.set()
            if error is not None and len(sizes) >= after:
                raise error
            sizes.append(len(batch.rows))
            return submit(batch, *rest)

        vars(replica)["_submit"] = submitted

    for each, sizes in zip(replicas, ran, strict=True):
        watch(each, sizes, error if each is replicas[-1] else None)
    return ran


def test_batches_are_shared_and_rows_stay_in_order() -> None:
    model = two()
    ran = met(model)
    told: list[tuple[int, int]] = []
    threads: set[str] = set()

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        threads.add(threading.current_thread().name)

    with ct.ledger() as led:
        vectors = model.encode(TEXTS, 4, progress=progress)
    expected = ct.load(TINY, "cpu").encode(TEXTS, 4)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert led.submissions == 15  # of the threads, too
    assert sum(map(len, ran)) == 15
    assert min(map(len, ran)) > 0
    assert told[-1] == (60, 60)
    assert threads == {threading.current_thread().name}
    np.testing.assert_array_equal(model.encode(TEXTS[:3]), ct.load(TINY, "cpu").encode(TEXTS[:3]))
    assert repr(model).count("<centella.Device cpu>") == 2


def test_a_cpu_and_webgpu(device: ct.Device) -> None:
    model = two(cpu(), device)
    vectors = model.encode(TEXTS[:20], 2)
    np.testing.assert_allclose(vectors, ct.load(TINY, "cpu").encode(TEXTS[:20]), atol=1e-5)


def test_a_device_that_fails_loses_no_text(caplog: pytest.LogCaptureFixture) -> None:
    model = two()
    ran = met(model, DeviceLostError("cuda:1: fell off the bus"), 1)
    vectors = model.encode(TEXTS, 4)
    np.testing.assert_allclose(vectors, ct.load(TINY, "cpu").encode(TEXTS, 4), atol=1e-6)
    assert [len(sizes) for sizes in ran] == [15, 1]  # what was in flight is run again
    (said,) = caplog.messages
    assert said.startswith("encode: cpu (1) failed, and its texts go to cpu: cuda:1: fell off")
    assert caplog.records[0].levelname == "ERROR"


def test_a_device_that_fails_last_gives_its_batches_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = two()
    healthy_is_done = threading.Event()
    work = several._Shared._work

    def watched(self: Any, name: str, submit: Any) -> None:
        work(self, name, submit)
        if name == "cpu":
            healthy_is_done.set()

    def late(*_: Any) -> Any:
        assert healthy_is_done.wait(30)  # no thread is there that could take its batch
        raise DeviceLostError("gone")

    monkeypatch.setattr(several._Shared, "_work", watched)
    vars(model.replicas[0])["_submit"] = late
    vectors = model.encode(TEXTS, 4)
    np.testing.assert_allclose(vectors, ct.load(TINY, "cpu").encode(TEXTS, 4), atol=1e-6)


def test_every_device_fails() -> None:
    model = two()

    met(model, ct.OutOfMemoryError("full"))
    submit = model._submit

    def gone(*given: Any) -> Any:
        submit(*given)
        raise DeviceLostError("gone")

    vars(model)["_submit"] = gone
    with pytest.raises(DeviceError, match="every device failed") as caught:
        model.encode(TEXTS, 4)
    assert "cpu: gone" in str(caught.value) and "cpu (1): full" in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        ct.OutOfMemoryError("full"), LimitError("wide"), DeviceLostError("gone"),
        CompileError("softmax", "fn main() {}", "syntax"),
    ],
)  # fmt: skip
def test_every_device_fails_alike(error: Exception) -> None:
    for count in (60, 1):
        model = two()
        for each in (model, *model.replicas):
            fail(each, error)
        with pytest.raises(type(error), match=r"every device failed: cpu.*; cpu") as caught:
            model.encode(TEXTS[:count], 4)
        assert type(caught.value) is type(error)
        assert "cpu: " in str(caught.value) and "cpu (1): " in str(caught.value)


def test_few_texts_go_to_the_next_device(caplog: pytest.LogCaptureFixture) -> None:
    alone = ct.load(TINY, "cpu")
    model = two()
    tries = fail(model, ct.OutOfMemoryError("full"))
    np.testing.assert_allclose(model.encode("a"), alone.encode("a"), atol=1e-6)
    (said,) = caplog.messages
    assert said == "encode: cpu failed, and its texts go to cpu (1): full"
    told: list[tuple[int, int]] = []
    few = model.encode(TEXTS[:3], exact=True, progress=lambda *n: told.append(n))
    np.testing.assert_allclose(few, alone.encode(TEXTS[:3]), atol=1e-6)
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert len(tries) == 2  # it may have room again


def test_a_lost_device_gets_no_more_texts(caplog: pytest.LogCaptureFixture) -> None:
    model, alone = two(), ct.load(TINY, "cpu")
    tries = fail(model, DeviceLostError("gone"))
    for texts in (["a"], ["b"], TEXTS):
        np.testing.assert_allclose(model.encode(texts, 4), alone.encode(texts, 4), atol=1e-6)
    assert (len(tries), len(caplog.messages)) == (1, 1)
    closed = two()
    closed.warm()
    closed.model.device.close()
    np.testing.assert_allclose(closed.encode("a"), alone.encode("a"), atol=1e-6)
    fail(model.replicas[0], ct.OutOfMemoryError("full"))
    with pytest.raises(DeviceError, match=r"every device failed: cpu: gone; cpu \(1\): full"):
        model.encode("a")
    assert model.encode([]).shape == (0, model.dim)


def test_a_device_that_fails_is_not_warmed(caplog: pytest.LogCaptureFixture) -> None:
    for lost in (0, 1):
        caplog.clear()
        model = two()
        replicas = (model, *model.replicas)
        replicas[lost].model.device.close()
        for _ in range(2):
            model.warm()
        names = ("cpu", "cpu (1)")
        (said,) = caplog.messages
        assert said.startswith(
            f"encode: {names[lost]} failed, and its texts go to {names[not lost]}"
        )
        with ct.ledger() as led:
            model.encode("warm")
        assert (led.compiles, led.submissions) == (0, 1)
    tries = [fail(each, ct.OutOfMemoryError("full")) for each in replicas]
    with pytest.raises(DeviceError, match=r"every device failed: cpu \(1\): .*; cpu: full"):
        model.warm()
    assert [len(sizes) for sizes in tries] == [1, 0]
    model = two()
    change_dense(model)
    with pytest.raises(ContractError, match="change those of each replica too"):
        model.warm()
    alone = ct.load(TINY, cpu())
    fail(alone, DeviceLostError("gone"))
    with pytest.raises(DeviceLostError, match=r"^gone$"):
        alone.warm()


def test_other_errors_are_raised_as_they_are() -> None:
    model = two()
    met(model, ValueError("of a caller"))
    with pytest.raises(ValueError, match="of a caller"):
        model.encode(TEXTS, 4)
    with pytest.raises(DTypeError, match=r"texts\[59\]: expected str"):
        model.encode([*TEXTS[:59], 3], 4)  # type: ignore[list-item]
    model = ct.load(TINY, "cpu")

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    other = two()
    with pytest.raises(KeyboardInterrupt):
        other.encode(TEXTS, 4, progress=stop)
    np.testing.assert_allclose(other.encode(TEXTS), model.encode(TEXTS), atol=1e-6)


def test_settings_are_those_of_the_first() -> None:
    model = two()
    model.config = ct.load(TINY, "cpu").config.__class__(12, "cls")
    alone = ct.load(TINY, "cpu")
    alone.config = model.config
    np.testing.assert_allclose(model.encode(TEXTS, 4), alone.encode(TEXTS, 4), atol=1e-6)
    exact = model.encode(TEXTS, exact=True)
    np.testing.assert_array_equal(exact, alone.encode(TEXTS, exact=True))


def negated(x: ct.Tensor) -> ct.Tensor:
    return -x


def change_dense(model: Embedder) -> None:
    model.dense = (negated,)  # type: ignore[assignment]


def change_heads(model: Embedder) -> None:
    model.heads["sparse"] = nn.Linear(model.dim, 1)


def change_model(model: Embedder) -> None:
    model.model = ct.load(TINY, cpu()).model


def change_weights(model: Embedder) -> None:
    norm = model.model.embeddings.LayerNorm
    norm.weight = norm.weight * 2


@pytest.mark.parametrize("change", [change_dense, change_heads, change_model, change_weights])
def test_replicas_are_of_what_was_changed(change: Callable[[Embedder], None]) -> None:
    model, alone = two(), ct.load(TINY, "cpu")
    model.encode(TEXTS, 4)
    change(model)
    for texts in ("a", TEXTS):
        with pytest.raises(ContractError, match="change those of each replica too and set replic"):
            model.encode(texts, 4)
    for each in (alone, *model.replicas):
        change(each)
    model.replicas = model.replicas
    np.testing.assert_allclose(model.encode(TEXTS, 4), alone.encode(TEXTS, 4), atol=1e-6)


def test_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CENTELLA_DEVICE", "cpu")
    done: list[tuple[int, int]] = []
    model = ct.load(TINY, devices="all", warm=True, progress=lambda *n: done.append(n))
    assert (model.model.device.name, model.replicas) == ("cpu", ())
    done.clear()
    ct.load(TINY, devices=[cpu(), cpu()], progress=lambda *n: done.append(n))
    assert done[-1][0] == done[-1][1]
    assert [d for d, _ in done] == sorted(d for d, _ in done)


def test_names_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def adapter(driver: str, kind: str) -> Any:
        return SimpleNamespace(info={"backend_type": driver, "adapter_type": kind})

    here = [adapter("Vulkan", "DiscreteGPU")] * 2
    here += [adapter("D3D12", "DiscreteGPU")] * 2 + [adapter("Vulkan", "CPU")]
    module = SimpleNamespace(
        device_count=lambda: 3, adapters=lambda: here,
        is_software=lambda a: a.info["adapter_type"] == "CPU",
    )  # fmt: skip
    monkeypatch.setattr(opening, "import_module", lambda _: module)
    assert opening.names_of("cuda") == ["cuda:0", "cuda:1", "cuda:2"]
    assert opening.names_of("webgpu") == ["webgpu:0", "webgpu:1"]  # by the other driver, the same
    here[:4] = []
    assert opening.names_of("webgpu") == ["webgpu:0"]
    assert opening.names_of("cpu") == ["cpu"]


def test_what_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"devices": "every"}, ShapeError, "load: expected devices of all, got 'every'"),
        ({"devices": 5}, DTypeError, 'expected "all" or a list of devices, got int'),
        ({"devices": cpu()}, DTypeError, 'expected "all" or a list of devices, got Device'),
        ({"devices": []}, DeviceError, "devices: expected one or more, each once"),
        ({"devices": ["cpu", "cpu"]}, DeviceError, "devices: expected one or more, each once"),
        (
            {"devices": ["cpu"], "device": "cpu"},
            DeviceError,
            "expected device or devices, got both",
        ),
    ]
    for options, error, text in wrong:
        with pytest.raises(error, match=text):
            ct.load(TINY, **options)
    decoder = DATA / "decoders" / "qwen3"
    with pytest.raises(
        WeightsError, match="devices: expected a model that embeds or classifies, got a Generator"
    ):
        ct.load(decoder, devices=[cpu(), cpu()])


# -- classifiers ----------------------------------------------------------------------------------

DOCUMENTS = [f"{'rain over the ' * (i % 4)}{WORDS[i % len(WORDS)]}" for i in range(40)]


def test_pairs_are_shared_and_scores_stay_in_order(tmp_path: Path) -> None:
    folder = with_tokenizer("bert-labels", tmp_path)  # whose pairs have types
    alone = ct.load(folder, "cpu", task="classify")
    model = ct.load(folder, devices=(cpu(), cpu()), task="classify", warm=True)
    pairs = [("the lake", text) for text in DOCUMENTS]
    ran = met(model)
    scores = model.predict(pairs, batch_size=4)
    np.testing.assert_allclose(scores, alone.predict(pairs, batch_size=4), atol=1e-6)
    assert sum(map(len, ran)) == 10 and min(map(len, ran)) > 0
    for texts in (DOCUMENTS, DOCUMENTS[:2], []):
        labels = model.classify(texts, batch_size=4)
        wanted = alone.classify(texts, batch_size=4)
        assert [[x.label for x in row] for row in labels] == [[x.label for x in r] for r in wanted]
    assert repr(model) == "Classifier(3 labels, <centella.Device cpu>, <centella.Device cpu>)"


@pytest.mark.parametrize("name", ["gte-rank", "qwen3"])
def test_a_ranking_goes_on_where_a_device_fails(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = DATA / "rerankers" / name if name == "qwen3" else with_tokenizer(name, tmp_path)
    model = ct.load(folder, devices=(cpu(), cpu()), task="classify")
    wanted = ct.load(folder, "cpu", task="classify").rank("the lake", DOCUMENTS)
    met(model, ct.OutOfMemoryError("full"), 1)
    ranked = model.rank("the lake", DOCUMENTS, batch_size=4)
    np.testing.assert_allclose([r.score for r in ranked], [r.score for r in wanted], atol=1e-6)
    assert sorted(r.index for r in ranked) == list(range(len(DOCUMENTS)))
    (said,) = caplog.messages
    assert said == "classify: cpu (1) failed, and its texts go to cpu: full"
    fail(model, DeviceLostError("gone"))
    with pytest.raises(
        DeviceError, match=r"classify: every device failed: cpu: gone; cpu \(1\): f"
    ):
        model.rank("the lake", DOCUMENTS, batch_size=4)


def test_tokens_on_several_devices(tmp_path: Path) -> None:
    folder = with_tokenizer("bert-tags", tmp_path)
    model = ct.load(folder, devices=(cpu(), cpu()), task="tag")
    assert model.classify(DOCUMENTS, batch_size=4) == ct.load(folder, "cpu", task="tag").classify(
        DOCUMENTS, batch_size=4
    )


def test_a_classifier_is_warmed_and_changed_on_each_device(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = ct.load(with_tokenizer("gte-rank", tmp_path), devices=(cpu(), cpu()), task="classify")
    model.model.device.close()
    model.warm()
    (said,) = caplog.messages
    assert said.startswith("classify: cpu failed, and its texts go to cpu (1)")
    with ct.ledger() as led:
        model.classify("warm")
    assert (led.compiles, led.submissions) == (0, 1)
    model.model.head.out.weight = model.replicas[0].model.head.out.weight
    with pytest.raises(ContractError, match="classify: expected model, dense and heads as they"):
        model.rank("the lake", DOCUMENTS)
