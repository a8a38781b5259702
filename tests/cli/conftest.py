"""What every test of the command line has."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("typer")

from centella.cli import output


@pytest.fixture(scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _no_files_in_the_users_cache(_cache_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo keeps vectors there; one folder a session, as devices are checked once for it.

    Mesa's compiled shaders stay where they are.
    """
    own = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    monkeypatch.setenv("MESA_SHADER_CACHE_DIR", os.environ.get("MESA_SHADER_CACHE_DIR", own))
    monkeypatch.setenv("XDG_CACHE_HOME", _cache_folder)


@pytest.fixture(autouse=True)
def _no_lines_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a command takes longer than the time after which it says how far it is."""
    monkeypatch.setattr(output, "SECONDS", 1e9)
