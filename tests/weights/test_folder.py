"""Where `load` finds a model."""

from __future__ import annotations

from pathlib import Path

import pytest

import centella as ct
from centella.weights.folder import find_model


def test_a_path_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert find_model("~/models") == tmp_path / "models"
    with pytest.raises(ct.WeightsError, match="expected a model folder"):
        find_model("~nobody-of-that-name/models")
