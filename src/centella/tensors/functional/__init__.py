"""The public functions over tensors: names, order and defaults of the array API and PyTorch.

Each module lists what is public; this one and `centella` take all of it.
"""

from centella.tensors.creation import arange, full, zeros
from centella.tensors.functional import (
    attend,
    axes,
    elementwise,
    largest,
    move,
    positions,
    products,
)
from centella.tensors.functional.attend import *
from centella.tensors.functional.axes import *
from centella.tensors.functional.elementwise import *
from centella.tensors.functional.largest import *
from centella.tensors.functional.move import *
from centella.tensors.functional.positions import *
from centella.tensors.functional.products import *

__all__ = ["arange", "full", "zeros"]
__all__ += attend.__all__
__all__ += axes.__all__
__all__ += elementwise.__all__
__all__ += largest.__all__
__all__ += move.__all__
__all__ += positions.__all__
__all__ += products.__all__
