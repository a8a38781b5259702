"""What stands where on docs/api.md: its sections, in the order in which a user needs them.

A name is one of `centella`, or of its modules with `audio.`, `nn.` or `serving.` before it. One
with `:` is a class that has no public name, but whose objects users hold: `module:Class`.
"""

from __future__ import annotations

from centella.ops.elementwise import BOOLS, TABLE

INTRO = """\
# API

Every public name, by what it is for; `import centella as ct` has them all. This page is made of the
docstrings by `tests/support/make_api.py`; `help(ct.softmax)` shows the same where you work.

```python
import centella as ct

print(ct.softmax(ct.asarray([[1.0, 2.0, 3.0]], device="cpu"), axis=-1).numpy())
```

In signatures `Array` is a NumPy array, `Number` an `int` or `float`, `Shape` a tuple of integers,
`Axes` an integer, a tuple of them or `None`. A dtype is one of the objects [below](#dtypes), its
name (`"f16"`) or NumPy's; where a device is taken, so is its name (`"cuda:0"`), and without one
the innermost open batch's counts, else the default. In the texts [b, n] is a shape. A function
raises at the line that calls it, before anything is recorded: `ShapeError` and `DTypeError` for
operands that do not fit, `DeviceError` for those of two devices.
"""

CHOICES = [e.name for e in TABLE if e.compares or e.conditions or e.kinds == BOOLS]
COMPUTED = [e for e in TABLE if e.name not in (*CHOICES, "copy")]
INTEGERS = " ".join([*(e.name for e in COMPUTED if "int" in e.kinds), "cast"])

SECTIONS: tuple[tuple[str, str, str], ...] = (
    (
        "Devices and batches",
        "[Concepts](concepts.md) says when work runs; [other libraries](interop.md) how a device, "
        "its memory and its streams are shared.",
        "device devices Device centella.runtime.memory:Memory CommandBatch PipelineCache "
        "CachedPipeline",
    ),
    (
        "Making tensors",
        "What is made on the device uploads nothing.",
        "asarray from_host from_dlpack empty zeros ones full arange",
    ),
    (
        "Tensors, and reading them",
        "A tensor takes `+ - * / // % ** @ < <= > >= & | ~`, `abs(x)`, `x[...]` with integers, "
        "slices, `None` and `...` (a view), `len(x)`, and iteration over its rows. `np.asarray(x)` "
        "reads it as `x.numpy()` does, and where it has one element so do `float(x)`, `int(x)` and "
        "`bool(x)`.",
        "Tensor fetch Pending Event",
    ),
    (
        "Element-wise",
        "Neighbours in a formula become one launch. f32 with f16 or bf16 gives f32, another mix of "
        "dtypes is a `DTypeError`; a number takes the dtype of the tensor. Shapes "
        "broadcast as NumPy's do. Integers are taken by "
        f"`{INTEGERS.replace(' ', '`, `')}`; bools by `cast` alone. The arithmetic is the "
        "[same](kernel-language.md#arithmetic) on every device.",
        " ".join([*(e.name for e in COMPUTED), "cast"]),
    ),
    (
        "Comparisons and where",
        "`==` of two tensors raises; `ct.eq` compares.",
        " ".join(CHOICES),
    ),
    (
        "Products and quantisation",
        "Sums of floats are f32, whatever the dtype of the operands.",
        "matmul linear normed_linear dot conv1d MatmulCache "
        "centella.nn.matmul_cache:CachedWeight quantize_int8 quantize_blocks dequantize quantize "
        "QTensor",
    ),
    (
        "Along axes",
        "",
        "sum mean var max min argmax topk sort argsort cumsum softmax log_softmax layer_norm "
        "rms_norm l2_normalize mean_pool",
    ),
    (
        "Moving",
        "`x[a:b]`, `x.T`, `x.permute` and `x.reshape` are views where they can be: see `Tensor`.",
        "concat stack split chunk broadcast_to repeat pad tril gather take_along_axis scatter "
        "embedding interleaved_to_head_first",
    ),
    (
        "Attention, caches, State",
        "",
        "attention rope rope_tables KVCache State",
    ),
    (
        "Replay",
        "[Concepts](concepts.md#replay) has the rules.",
        "jit centella.tensors.jit:Jitted Compiled",
    ),
    (
        "Modules",
        "[Modules](nn.md) has examples, and the names that checkpoints give to parameters.",
        "nn nn.Module nn.parameter nn.Parameter nn.Stored nn.Linear nn.Embedding nn.LayerNorm "
        "nn.RMSNorm nn.Conv1d nn.SelfAttention nn.CrossAttention nn.split_heads nn.join_heads "
        "nn.EncoderBlock nn.DecoderBlock nn.ConvFrontend",
    ),
    (
        "Models",
        "[Encoders](encoders.md) and [decoders](generate.md) are listed there. "
        "[A service](service.md) embeds the texts of many requests together; [search](search.md) "
        "finds the vectors nearest to one; [transcribe](transcribe.md) has sound to text.",
        "load Embedder centella.tasks.embed.embeddings:Embeddings "
        "centella.tasks.embed.embeddings:Cut centella.tasks.text.chunks:Chunk "
        "Generator Generation Stream Scheduler Request TokenLogprobs Sampling "
        "Transcriber centella.tasks.transcribe.transcriber:Transcript "
        "centella.tasks.transcribe.transcription:Transcription "
        "centella.tasks.transcribe.options:Options "
        "serving serving.Batcher Index Matches Classifier TokenClassifier Label Ranked Span",
    ),
    (
        "Audio",
        "[Audio](audio.md) says what is read by which package.",
        "audio log_mel audio.host_log_mel audio.open_audio audio.read_audio audio.AudioStream "
        "audio.windows audio.speech_regions audio.speech_pieces audio.SpeechDetector "
        "audio.SpeechRules audio.SileroModel audio.Segment audio.Word audio.by_word "
        "audio.format_transcript",
    ),
    (
        "Ledger",
        "[The ledger](ledger.md) shows it at work.",
        "ledger forbid totals Ledger Counts centella.ledger.timeline:KernelTime",
    ),
    (
        "Your own kernels",
        "[Your own kernel](own-kernel.md) shows how; [the kernel language](kernel-language.md) "
        "defines what is in `ct.lang`.",
        "kernel UserKernel In Out InOut Scalar lang",
    ),
    ("DTypes", "", "DType f32 f16 bf16 i32 u32 i8 u8 bool_"),
    (
        "Errors",
        "Each is a `CentellaError`; [troubleshooting](troubleshooting.md#what-each-error-means) "
        "says what to do.",
        "CentellaError ShapeError DTypeError DeviceError DeviceLostError LimitError "
        "OutOfMemoryError ContractError DiscardedError TransferForbidden KVCacheFullError "
        "TraceError CompileError SimulationError WeightsError AudioError MissingExtraError",
    ),
    ("Version", "", "__version__"),
)

# Public methods that the library's own parts call on one another: they may change.
INNER: dict[str, str] = {
    "Device": "glance lend native_of",
    "PipelineCache": "get hit",
}

# Classes whose objects a function gives: how one is constructed is nobody's business.
GIVEN = (
    "Tensor Device Pending Event UserKernel Embedder Generator Request Ledger Counts DType "
    "CachedPipeline Memory KernelTime CachedWeight Jitted nn.Parameter nn.Stored nn.Module "
    "Classifier TokenClassifier audio.AudioStream"
)
