"""What PyInstaller has to be told about centella; it finds this folder by an entry point."""

from pathlib import Path


def hook_dirs() -> list[str]:
    """The folder of `hook-centella.py`."""
    return [str(Path(__file__).parent)]
