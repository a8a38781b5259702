"""Texts and pairs to labels and scores, documents in order; equal to the model's logits."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import centella as ct
from centella.errors import DTypeError, ShapeError, WeightsError
from centella.tasks.classify.classifier import Classifier, TokenClassifier
from centella.tasks.classify.labels import activated
from centella.tasks.load import load
from centella.tasks.text.tokenizer import Tokenizer
from tests.support.model_common import DATA, pack, shapes_of

tokenizers = pytest.importorskip("tokenizers")

WORDS = (
    "lake river rain storm snow sun tree leaf boat bridge stone sand wind the a over under".split()
)
DOCUMENTS = ["the lake", "rain over the river", "a stone", "snow over the tree over the bridge",
             "sun", "wind the boat"]  # fmt: skip
Array = np.ndarray[Any, Any]


def with_tokenizer(name: str, where: Path, **config: Any) -> Path:
    """A checkpoint with a tokenizer of whole words: <s> a </s> b </s>, where b has type 1."""
    folder = where / name
    shutil.copytree(DATA / "encoders" / name, folder)
    values = json.loads((folder / "config.json").read_text())
    special = ["<s>", "</s>", "<unk>"]
    special.insert(values.get("pad_token_id") or 0, "<pad>")
    vocab = {word: i for i, word in enumerate([*special, *WORDS])}
    native = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    native.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    native.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[(name, vocab[name]) for name in ("<s>", "</s>")],
    )
    native.add_special_tokens(special)
    native.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"pad_token": "<pad>", "model_max_length": 12})
    )
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    return folder


def logits_of(task: Any, rows: list[tuple[list[int], list[int]]]) -> Array:
    """Of each text alone: (ids, types)."""
    device = task.model.device
    logits = []
    for ids, types in rows:
        inputs = [ct.asarray(np.array([x], np.int32), device=device) for x in (ids, types)]
        length = ct.asarray(np.array([len(ids)], np.int32), device=device)
        logits.append(task(inputs[0], length, inputs[1]).numpy()[0])
    return np.array(logits)


def pair_ids(task: Any, a: str, b: str) -> tuple[list[int], list[int]]:
    """As the library cuts them, longest first."""
    native = tokenizers.Tokenizer.from_str(task.tokenizer.native.to_str())
    native.enable_truncation(task.config.max_length, strategy="longest_first")
    encoding = native.encode(a, b)
    return encoding.ids, encoding.type_ids


@pytest.mark.parametrize("name", ["bert-labels", "xlm-roberta-rank"])
def test_scores_of_pairs(device: ct.Device, tmp_path: Path, name: str) -> None:
    """Of unequal lengths, some cut; types count in BERT and not in XLM-R."""
    task = load(with_tokenizer(name, tmp_path), device=device, task="classify")
    pairs = [(a, b) for a in DOCUMENTS[:3] for b in (*DOCUMENTS, " ".join(WORDS))]
    scores = task.predict(pairs, batch_size=4, activation="identity")
    rows = [pair_ids(task, a, b) for a, b in pairs]
    typed = task.model.config.type_vocab_size > 1
    wanted = logits_of(task, [(ids, types if typed else [0] * len(ids)) for ids, types in rows])
    if name == "xlm-roberta-rank":
        wanted = wanted[:, 0]
    assert max(len(ids) for ids, _ in rows) == 12
    np.testing.assert_allclose(scores, wanted, atol=1e-5)
    with ct.ledger() as led:
        task.predict(pairs[:4], batch_size=4)
    led.expect(submissions=1, uploads=1, downloads=1)


def test_ranking(device: ct.Device, tmp_path: Path) -> None:
    task = load(with_tokenizer("gte-rank", tmp_path), device=device)
    assert isinstance(task, Classifier)
    scores = task.predict([("the lake", text) for text in DOCUMENTS])
    assert ((scores > 0) & (scores < 1)).all()  # sigmoid, of one label
    ranked = task.rank("the lake", DOCUMENTS, top_k=4, batch_size=2)
    order = np.argsort(-scores, kind="stable")[:4]
    assert [r.index for r in ranked] == order.tolist()
    assert [r.text for r in ranked] == [DOCUMENTS[i] for i in order]
    np.testing.assert_allclose([r.score for r in ranked], scores[order], atol=1e-6)
    assert task.rank("the lake", []) == []
    assert task.predict(("the lake", DOCUMENTS[1])) == pytest.approx(scores[1], abs=1e-6)


@pytest.mark.devices("webgpu", "simulator", "cuda", "webgpu-hardware")
@pytest.mark.parametrize(
    "name", ["bert-labels", "xlm-roberta-rank", "modernbert-labels", "mpnet-labels"]
)
def test_unequal_pairs_lie_end_to_end(
    device: ct.Device, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the types of their parts; other pairs compile and plan nothing."""
    task = load(with_tokenizer(name, tmp_path), device=device, task="classify")
    texts = ["the lake", "sun", " ".join(WORDS), "a", "rain", "over the river"]
    pairs = [("sun", text) for text in texts]
    wanted = [task.predict(pair, activation="identity") for pair in pairs]
    pack(monkeypatch)
    task._capture()
    shapes = shapes_of(task)
    scores = task.predict(pairs, activation="identity")
    np.testing.assert_allclose(scores, wanted, atol=2e-6)
    with ct.ledger() as led:
        again = task.predict([pairs[i] for i in (2, 0, 1, 4, 3, 5)], activation="identity")
    led.expect(uploads=1, submissions=1, downloads=1, compiles=0, plans=0)
    np.testing.assert_allclose(again, scores[[2, 0, 1, 4, 3, 5]], atol=2e-6)
    assert shapes == [((48,), (9,), (48,))] * 2


@pytest.mark.devices("webgpu", "simulator", "cuda", "webgpu-hardware")
def test_tags_of_texts_end_to_end(
    device: ct.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load(with_tokenizer("bert-tags", tmp_path), device=device)
    texts = ["the lake over", "sun", " ".join(WORDS), "a", "over the river"]
    wanted = [task.classify(text, grouped=False) for text in texts]
    pack(monkeypatch)
    task._capture()
    shapes = shapes_of(task)
    for spans, expected in zip(task.classify(texts, grouped=False), wanted, strict=True):
        assert [(s.label, s.text) for s in spans] == [(s.label, s.text) for s in expected]
        np.testing.assert_allclose([s.score for s in spans], [s.score for s in expected], atol=1e-6)
    assert [len(shape) for shape, *_ in shapes] == [1]


def test_labels_of_texts(tmp_path: Path) -> None:
    folder = with_tokenizer("bert-labels", tmp_path)
    task = load(folder, device="cpu", task="classify")
    classified = task.classify(DOCUMENTS, batch_size=4)
    ids = task.tokenizer.encode(DOCUMENTS)
    shares = np.exp(logits_of(task, [(i, [0] * len(i)) for i in ids]).astype(np.float64))
    shares /= shares.sum(1, keepdims=True)
    for labels, row in zip(classified, shares, strict=True):
        assert [label.label for label in labels] == [task.labels[i] for i in np.argsort(-row)]
        np.testing.assert_allclose([label.score for label in labels], np.sort(row)[::-1], atol=1e-5)
    (best,) = task.classify(DOCUMENTS[0], top_k=1)
    assert (best.label, best.score) == (
        classified[0][0].label,
        pytest.approx(classified[0][0].score),
    )
    assert repr(task) == "Classifier(3 labels, <centella.Device cpu>)"
    several = with_tokenizer(
        "bert-labels", tmp_path / "b", problem_type="multi_label_classification"
    )
    each = load(several, device="cpu").classify(DOCUMENTS[0])
    assert sum(label.score for label in each) != pytest.approx(1, abs=1e-3)


def test_tags_of_tokens(device: ct.Device, tmp_path: Path) -> None:
    task = load(with_tokenizer("bert-tags", tmp_path), device=device)
    assert isinstance(task, TokenClassifier)
    text = "the lake over the river"
    spans = task.classify([text, "sun"], grouped=False)[0]
    assert [text[s.start : s.end] for s in spans] == [s.text for s in spans] == text.split()
    ids = task.tokenizer.encode([text])[0]
    rows = activated(logits_of(task, [(ids, [0] * len(ids))])[0], "softmax")[1:-1]
    assert [s.label for s in spans] == [task.labels[i] for i in rows.argmax(1)]
    np.testing.assert_allclose([s.score for s in spans], rows.max(1), atol=1e-5)


def test_neighbours_become_one_span(tmp_path: Path) -> None:
    task = load(with_tokenizer("bert-tags", tmp_path), device="cpu", task="tag")
    text = "the lake over the river"
    encoded = task.tokenizer.encode_whole([text])[0]
    scores = np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1, 1, 0]]  # <s> B I O B B </s>
    scores[2, 2] = 0.5
    spans = task._spans(text, encoded, scores, True)
    assert [(s.label, s.text, s.score) for s in spans] == [
        ("LAKE", "the lake", 0.75), ("LAKE", "the", 1.0), ("LAKE", "river", 1.0)
    ]  # fmt: skip


@pytest.mark.parametrize("most", [3, 4, 5, 6, 7, 9, 12])
def test_pairs_are_cut_as_transformers_cuts_them(tmp_path: Path, most: int) -> None:
    folder = with_tokenizer("bert-labels", tmp_path)
    tokenizer = Tokenizer.from_folder(folder)
    texts = [" ".join(WORDS[:n]) for n in (0, 1, 2, 3, 5, 8)]
    pairs = [(a, b) for a in texts for b in texts]
    native = tokenizers.Tokenizer.from_str(tokenizer.native.to_str())
    native.enable_truncation(most, strategy="longest_first")
    firsts, seconds = zip(*pairs, strict=True)
    encodings = tokenizer.encode_whole(firsts, seconds, most)
    assert [(e.ids, e.types) for e in encodings] == [
        (e.ids, e.type_ids) for e in native.encode_batch(pairs)
    ]


def test_activation_of_the_folder(tmp_path: Path) -> None:
    own = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    task = load(with_tokenizer("gte-rank", tmp_path, **own), device="cpu", task="classify")
    pair = ("the lake", "sun")
    assert task.predict(pair) == task.predict(pair, activation="identity")
    wrong = {"sbert_ce_default_activation_function": "torch.nn.Swell"}
    with pytest.raises(WeightsError, match=r"activation_fn: expected identity, .*, got swell"):
        load(with_tokenizer("gte-rank", tmp_path / "b", **wrong), device="cpu")


@pytest.fixture
def ranker(tmp_path: Path) -> Classifier:
    return load(with_tokenizer("gte-rank", tmp_path), device="cpu", task="classify")


def test_what_is_refused(ranker: Any, tmp_path: Path) -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: ranker.predict(["one", "two", "three"]), DTypeError, r"pairs\[0\]: expected two"),
        (
            lambda: ranker.predict([("a", 3)]),
            DTypeError,
            r"^predict: pairs\[0\]\[1\]: expected str, got int",
        ),
        (lambda: ranker.predict(7), DTypeError, "expected str or an iterable of str, got int"),
        (lambda: ranker.predict("no"), DTypeError, r"pairs\[0\]: expected two texts, got \['no'\]"),
        (lambda: ranker.rank(3, ["a"]), DTypeError, "query: expected str, got int"),
        (lambda: ranker.rank("a", "b"), DTypeError, "documents: expected several texts"),
        (lambda: ranker.rank("a", ["b"], top_k=0), ShapeError, "top_k of 1 or more"),
        (lambda: ranker.rank("a", ["b", None]), DTypeError, r"^rank: documents\[1\]: .* NoneType$"),
        (lambda: ranker.rank("\ud800", ["b"]), ShapeError, "^rank: query: expected valid Unicode"),
        (
            lambda: ranker.classify(["a", 1]),
            DTypeError,
            r"^classify: texts\[1\]: expected str, got",
        ),
        (lambda: ranker.rank("a", ["b"], activation="x"), ShapeError, "^rank: expected activation"),
        (lambda: ranker.rank("a", ["b"], batch_size=0), ShapeError, "^rank: .*batch_size of 1 or"),
        (lambda: ranker.predict([("a", "b")], activation="x"), ShapeError, "activation of ident"),
        (lambda: ranker.rank("a", ["b"], show_progress_bar=True), DTypeError, "write progress="),
        (lambda: ranker.classify(["\udc80"]), ShapeError, "expected valid Unicode"),
    ]
    for call, error, text in wrong:
        with pytest.raises(error, match=text):
            call()
    assert len(ranker.rank("a", ["b", "c"])) == 2  # still works
    labels = load(with_tokenizer("bert-labels", tmp_path), device="cpu", task="classify")
    with pytest.raises(ShapeError, match="rank: expected a model of one label, got 3"):
        labels.rank("a", ["b"])
    bare = load(DATA / "encoders" / "bert-labels", device="cpu", task="classify")
    with pytest.raises(WeightsError, match=r"tokenizer\.json: expected a tokenizer, got no such"):
        bare.classify("a")


def test_progress(ranker: Classifier, caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO):
        ranker.rank("a", DOCUMENTS, batch_size=4, progress=lambda *n: told.append(n))
    assert told == [(4, 6), (6, 6)]


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label: expected names by 0, 1, ..., got"),
        ({"id2label": None, "num_labels": 0}, "num_labels: expected 1 to 100000, got 0"),
        ({"problem_type": "guess"}, "problem_type: expected None, regression, .*, got 'guess'"),
        ({"classifier_pooling": "max"}, "classifier_pooling: expected cls, mean, got 'max'"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, edit: dict[str, Any], text: str) -> None:
    with pytest.raises(WeightsError, match=text):
        load(with_tokenizer("bert-labels", tmp_path, **edit), device="cpu")
