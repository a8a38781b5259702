"""centella: transformers on the GPU you have, from one pip install.

Data stays on the device, work is recorded and submitted once, kernels are written once in Python
and run as WGSL (any GPU), PTX (NVIDIA) and NumPy.
"""

from typing import TYPE_CHECKING

from centella.host import early as _early  # noqa: F401  # comes first: it has Ctrl-C handled

# isort: split
from centella import lang
from centella.dtypes import DType, bf16, bool_, f16, f32, i8, i32, u8, u32
from centella.errors import (
    AudioError,
    CentellaError,
    CompileError,
    ContractError,
    DeviceError,
    DeviceLostError,
    DiscardedError,
    DTypeError,
    KVCacheFullError,
    LimitError,
    MissingExtraError,
    OutOfMemoryError,
    ShapeError,
    SimulationError,
    TraceError,
    TransferForbidden,
    WeightsError,
)
from centella.host.version import __version__
from centella.lang import In, InOut, Out, Scalar
from centella.ledger.counts import Counts, Ledger, forbid, ledger, totals
from centella.ops.quant.table import quantize_blocks, quantize_int8
from centella.record.history import Event
from centella.runtime.device import Device, device, devices
from centella.runtime.pending import Pending
from centella.runtime.pipelines import CachedPipeline, PipelineCache
from centella.tensors import functional as _functional
from centella.tensors.batch import CommandBatch
from centella.tensors.creation import arange as arange  # as full and zeros: functional lists it
from centella.tensors.creation import asarray, empty, from_dlpack, from_host, ones
from centella.tensors.creation import full as full
from centella.tensors.creation import zeros as zeros
from centella.tensors.functional.attend import *
from centella.tensors.functional.axes import *
from centella.tensors.functional.elementwise import *
from centella.tensors.functional.largest import *
from centella.tensors.functional.move import *
from centella.tensors.functional.positions import *
from centella.tensors.functional.products import *
from centella.tensors.jit import Compiled, jit
from centella.tensors.kernel import UserKernel, kernel
from centella.tensors.qtensor import QTensor, quantize
from centella.tensors.state import State
from centella.tensors.tensor import Tensor, fetch

if TYPE_CHECKING:  # which is to say itself what there is not
    # What `lookup` loads with its first use.
    from centella import audio, nn, serving
    from centella.audio.log_mel import log_mel
    from centella.nn.kv_cache import KVCache
    from centella.nn.matmul_cache import MatmulCache
    from centella.tasks.classify.classifier import Classifier, TokenClassifier
    from centella.tasks.classify.labels import Label, Ranked, Span
    from centella.tasks.embed.embedder import Embedder
    from centella.tasks.generate.generator import Generation, Generator
    from centella.tasks.generate.logprobs import TokenLogprobs
    from centella.tasks.generate.sampling import Sampling
    from centella.tasks.generate.stream import Stream
    from centella.tasks.load import load
    from centella.tasks.schedule.request import Request
    from centella.tasks.schedule.scheduler import Scheduler
    from centella.tasks.search import Index, Matches
    from centella.tasks.transcribe.transcriber import Transcriber
else:
    from centella.lookup import module_dir as __dir__  # noqa: F401  # Python calls both
    from centella.lookup import module_getattr as __getattr__  # noqa: F401

__all__ = [
    "AudioError",
    "CachedPipeline",
    "CentellaError",
    "Classifier",
    "CommandBatch",
    "CompileError",
    "Compiled",
    "ContractError",
    "Counts",
    "DType",
    "DTypeError",
    "Device",
    "DeviceError",
    "DeviceLostError",
    "DiscardedError",
    "Embedder",
    "Event",
    "Generation",
    "Generator",
    "In",
    "InOut",
    "Index",
    "KVCache",
    "KVCacheFullError",
    "Label",
    "Ledger",
    "LimitError",
    "Matches",
    "MatmulCache",
    "MissingExtraError",
    "Out",
    "OutOfMemoryError",
    "Pending",
    "PipelineCache",
    "QTensor",
    "Ranked",
    "Request",
    "Sampling",
    "Scalar",
    "Scheduler",
    "ShapeError",
    "SimulationError",
    "Span",
    "State",
    "Stream",
    "Tensor",
    "TokenClassifier",
    "TokenLogprobs",
    "TraceError",
    "Transcriber",
    "TransferForbidden",
    "UserKernel",
    "WeightsError",
    "__version__",
    "asarray",
    "audio",
    "bf16",
    "bool_",
    "device",
    "devices",
    "empty",
    "f16",
    "f32",
    "fetch",
    "forbid",
    "from_dlpack",
    "from_host",
    "i8",
    "i32",
    "jit",
    "kernel",
    "lang",
    "ledger",
    "load",
    "log_mel",
    "nn",
    "ones",
    "quantize",
    "quantize_blocks",
    "quantize_int8",
    "serving",
    "totals",
    "u8",
    "u32",
]  # fmt: skip
__all__ += _functional.__all__
