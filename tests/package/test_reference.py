"""The stored references are what PyTorch and transformers compute, where both are installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.model_common import minilm

SCRIPT = Path(__file__).parents[1] / "reference" / "make_reference.py"


@pytest.mark.slow
def test_stored_references_can_be_made_again() -> None:
    for package in ("torch", "transformers", "safetensors", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'centella[reference]'")
    command = [sys.executable, str(SCRIPT), "--check", "--minilm", str(minilm())]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
