"""What PyInstaller does not see by reading the imports of centella."""

# pyright: reportMissingModuleSource=false

from PyInstaller import isolated
from PyInstaller.utils.hooks import collect_data_files, collect_submodules

from centella.backends.opening import BACKENDS
from centella.emit.program import EMITTERS
from centella.lookup import LATER, ROOMS


def imported_by_driver() -> list[str]:
    """What the bindings of NVIDIA's driver import: they are compiled, so nobody can read it."""
    import sys

    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        return []
    return [name for name in sys.modules if name.partition(".")[0] == "cuda"]


datas = collect_data_files("centella")
# A string names the lowering of an op, the backend of a kind of device, the emitter of a target,
# of a family its model and what reads its task, and the file of a public name that loads later.
hiddenimports = isolated.call(imported_by_driver)
hiddenimports += collect_submodules("centella.ops") + collect_submodules("centella.models")
hiddenimports += collect_submodules("centella.tasks")
hiddenimports += [*LATER.values(), *(f"centella.{room}" for room in ROOMS)]
hiddenimports += [*EMITTERS.values(), *(module for module, _ in BACKENDS.values())]
