"""What PyInstaller does not see by reading the imports of centella."""

# pyright: reportMissingModuleSource=false

from PyInstaller import isolated
from PyInstaller.utils.hooks import collect_data_files, collect_submodules


def imported_by_driver() -> list[str]:
    """What the bindings of NVIDIA's driver import: they are compiled, so nobody can read it."""
    import sys

    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        return []
    return [name for name in sys.modules if name.partition(".")[0] == "cuda"]


datas = collect_data_files("centella")
# `ct.load` imports the modules of models by name.
hiddenimports = [*isolated.call(imported_by_driver), *collect_submodules("centella.models")]
