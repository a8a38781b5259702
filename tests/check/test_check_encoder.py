"""`check_model` of every family of encoders: their modules beside those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from centella.check import check_model
from tests.models.test_encoders import FOLDERS, HEADED
from tests.tasks.test_classify import with_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("torch")
pytest.importorskip("transformers")

SOME = [p.name for p in (*FOLDERS, *HEADED[:1])]


@pytest.mark.parametrize("name", SOME)
def test_modules_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    report = check_model(with_tokenizer(name, tmp_path), "cpu")
    assert report.ok, report.first
    assert len(report.layers) > 2
