"""What PyInstaller is told; `.ci/run` freezes examples/frozen_app and starts it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from centella.__pyinstaller import hook_dirs

ROOT = Path(__file__).parents[2]


def test_pyinstaller_is_told_where_the_hook_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pyinstaller40"] == {
        "hook-dirs": f"{hook_dirs.__module__}:{hook_dirs.__name__}"
    }
    (folder,) = hook_dirs()
    assert Path(folder, "hook-centella.py").is_file()


def test_telling_it_loads_no_driver() -> None:
    code = (
        "import sys, centella.__pyinstaller;"
        "print(*[m for m in ('PyInstaller', 'wgpu', 'cuda') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
