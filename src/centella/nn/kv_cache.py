"""`KVCache`: the keys and values of a decoder's past, resident, with their length on the device.

Each layer has two States, `[batch, kv_heads, capacity, head_dim]`, written in place; positions are
a State too, so one plan serves every length. The host keeps the lengths as well: it refuses what
does not fit before anything is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from centella.dtypes import DType, dtype_of, f32, i32
from centella.errors import ContractError, DeviceError, ShapeError
from centella.host.interrupts import uninterrupted
from centella.nn.cache_layer import CacheLayer, check_storage, planes_of
from centella.nn.cache_operands import Operands
from centella.nn.filled import Filled
from centella.nn.room import check_cache
from centella.op.op import get
from centella.record.recording import Recording
from centella.runtime.device import Device, current_device
from centella.runtime.device import device as open_device
from centella.tensors.arguments import check_tensors, whole
from centella.tensors.creation import asarray
from centella.tensors.functional import full, gather
from centella.tensors.state import State
from centella.tensors.tensor import Tensor, apply_all
from centella.tensors.views import integers

T = TypeVar("T")


class KVCache:
    """Keys and values of past tokens, on the device.

    Args:
        batch: sequences.
        num_kv_heads, head_dim: heads of keys and values, and their size.
        capacity: tokens that a sequence may have.
        num_layers: layers that share the positions.
        value_dim: size of a head of values; default: head_dim. Both lie in rows as wide as the
            larger; what takes a product of q, k and v needs one size.
        dtype: storage of keys and values: of what is appended, or i8. In i8 each key and value is
            a row of numbers of -127 to 127 with an f32 scale of its own, its largest magnitude /
            127: no element is off by more than half of that. What is appended, queries and results
            then have any float dtype.

    A step brings the same number of tokens to every sequence and layer: `append` begins it (or
    `begin`, where positions are needed first) and every layer appends once.

        for layer in range(cache.num_layers):
            cache.append(k, v, layer)
            y = cache.attend(q, layer)

    `append_attend` does both. With rotary embedding `append_qkv` takes the place of `append`, and
    gives q.

    Raises:
        ShapeError: a size below 1.
        DTypeError: a dtype that is neither a float nor i8.
        OutOfMemoryError: the device has no room; says how much is needed, and what is free.
    """

    def __init__(
        self, batch: int, num_kv_heads: int, head_dim: int, capacity: int, *, num_layers: int = 1,
        dtype: Any = f32, device: str | Device | None = None, value_dim: int | None = None,
    ) -> None:  # fmt: skip
        values = head_dim if value_dim is None else value_dim
        sizes = {"batch": batch, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
                 "capacity": capacity, "num_layers": num_layers, "value_dim": values}  # fmt: skip
        for name, value in sizes.items():
            whole("KVCache", name, value, 1)
        kind = dtype_of(dtype)
        check_storage("KVCache", kind)
        self.capacity: int = capacity
        rows = max(head_dim, values)
        self.shape: tuple[int, int, int, int] = (batch, num_kv_heads, capacity, rows)
        self.device: Device = current_device() if device is None else open_device(device)
        fewer = f"fewer tokens (capacity={capacity}) or sequences (batch={batch})"
        planes = planes_of(self.shape, kind).values()
        check_cache("KVCache", planes, num_layers, self.device, fewer)
        self._operands = Operands(self.shape, kind, num_layers, head_dim, values)
        self._steps = State(full((2, batch), 0, i32, self.device), name="KVCache positions")
        self._steps.mark(lambda _: Filled((0,) * batch))
        self._layers = [
            CacheLayer(self.shape, kind, self.device, "KVCache", i) for i in range(num_layers)
        ]

    def __repr__(self) -> str:
        return (
            f"<KVCache {list(self.shape)} {self.dtype.name}, {self.num_layers} layers, "
            f"{self.length} of {self.capacity} on {self.device.name}>"
        )

    @property
    def dtype(self) -> DType:
        """Storage of keys and values."""
        return self._layers[0].keys.dtype

    @property
    def num_layers(self) -> int:
        """Layers of the model, each with keys and values of its own."""
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return self._filled.ends

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @property
    def positions(self) -> Tensor:
        """Where the current step's first token stands in each sequence: [batch] i32."""
        return self._steps.value[0]

    @property
    def _filled(self) -> Filled:
        return self._steps.note  # type: ignore[no-any-return]  # a Filled from the first on

    def _has(self, layer: int) -> bool:
        """Whether a layer has this step's keys and values."""
        return bool(self._filled.tokens) and self._layers[layer].keys.note == self._filled.step

    @uninterrupted
    def begin(self, tokens: int = 1) -> Tensor:
        """Begin a step of `tokens` tokens; returns their first positions, [batch] i32.

        Raises:
            KVCacheFullError: there is no room for them.
            ContractError: a layer has not been given the step before.
        """
        self._begin(whole("begin", "a number of tokens", tokens, 1))
        return self.positions

    @uninterrupted
    def _begin(self, tokens: int, where: Recording | None = None) -> None:
        self._begun(self._filled, tokens)
        apply_all(get("cache_step"), (self._steps.value,), {"tokens": tokens}, where)
        self._steps.mark(lambda filled: self._begun(filled, tokens))

    def _begun(self, filled: Filled, tokens: int) -> Filled:
        """The step after `filled`, which every layer must have."""
        step, layers = filled.step, self._layers
        without = [i for i, layer in enumerate(layers) if layer.keys.note != step]
        if filled.tokens and without:
            raise ContractError(
                f"KVCache: the last step is unfinished: layers {without} have no keys and values "
                f"of it; append them, or truncate to take the step back"
            )
        return filled.begun(tokens, self.capacity)

    @uninterrupted
    def append(self, k: Tensor, v: Tensor, layer: int = 0) -> None:
        """Write the keys and values of this step's tokens; the first layer to do so begins it.

        When it raises, everything is as it was.

        Args:
            k, v: [batch, num_kv_heads, tokens, head_dim], of the cache's dtype; v of value_dim.

        Raises:
            KVCacheFullError: there is no room for them.
            ContractError: another layer brought another number of tokens to this step, or has not
                been given the step before.
        """
        self._operands.check(k, v, layer)
        self._append(k.shape[2], layer, lambda starts: self._layers[layer].write(k, v, starts))

    @uninterrupted
    def append_qkv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, layer: int = 0, *,
        qk_norm: Tensor | None = None, eps: float = 1e-6, interleaved: bool = False,
    ) -> Tensor:  # fmt: skip
        """`append` from the product of q, k and v, with rotary embedding, in one launch.

        q and k turn by the positions of this step's tokens (`rope`), k and v are written. Above a
        binding (WebGPU) each of these is a launch, divided by heads.

        Args:
            qkv: [batch, tokens, (heads + 2 num_kv_heads) head_dim], of the cache's dtype (of any
                float dtype in i8): heads of queries, of keys and of values beside each other.
            cos, sin: f32 [positions, rotary_dim / 2]: `rope_tables`.
            qk_norm: [2, head_dim]: weights of an RMS norm of each head of q, and of k, before they
                turn (Qwen3); eps: added to its mean of squares.
            interleaved: as for `rope`.

        Returns:
            q, [batch, heads, tokens, head_dim]: what `attend` takes.

        Raises:
            ShapeError, DTypeError: for what does not fit these.
            KVCacheFullError, ContractError: as for `append`.
        """
        x = self._operands.by_head("append_qkv", qkv, cos, sin, layer, qk_norm)
        kv_heads = self.shape[1]

        def write(starts: Tensor) -> Tensor:
            return self._layers[layer].write_qkv(
                x, kv_heads, cos, sin, starts, qk_norm=qk_norm, eps=eps, interleaved=interleaved
            )

        return self._append(qkv.shape[1], layer, write)

    @uninterrupted
    def attend_qkv(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, layer: int = 0, *,
        qk_norm: Tensor | None = None, eps: float = 1e-6, interleaved: bool = False,
        scale: float | None = None, window: int | None = None, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """`append_qkv`, then `attend` of what it gives: all that a layer does between products.

        While few queries share their keys that is one launch or two for f16 and bf16 on NVIDIA
        GPUs with tensor cores, for one token in f32 two; elsewhere it is the launches of both.

        Args:
            qkv, cos, sin, layer, qk_norm, eps, interleaved: as for `append_qkv`.
            scale, window, softcap: as for `attend`.

        Returns:
            [batch, heads, tokens, head_dim].

        Raises:
            ShapeError, DTypeError, KVCacheFullError, ContractError: as both.
        """
        x = self._operands.by_head("attend_qkv", qkv, cos, sin, layer, qk_norm)
        kv_heads = self.shape[1]
        if window is not None and whole("attend_qkv", "window", window, 1) >= self.capacity:
            window = None  # all keys are within it

        def write(starts: Tensor) -> Tensor:
            return self._layers[layer].attend_qkv(
                x, kv_heads, cos, sin, starts, qk_norm=qk_norm, eps=eps, interleaved=interleaved,
                scale=scale, window=window, softcap=softcap,
            )  # fmt: skip

        return self._append(qkv.shape[1], layer, write)

    def _append(self, tokens: int, layer: int, write: Callable[[Tensor], T]) -> T:
        """Record what writes a layer's part of a step from some positions on; what it gives."""
        filled = self._filled
        begins = not filled.tokens or self._has(layer)
        if begins:
            self._begun(filled, tokens)
        elif filled.tokens != tokens:
            raise ContractError(
                f"append: this step brings {filled.tokens} tokens, layer {layer} got {tokens}"
            )
        steps = self._steps.value
        result = write(steps[1] if begins else steps[0])
        keys = self._layers[layer].keys
        if begins:  # only now: a write that cannot be recorded begins nothing
            self._begin(tokens, keys.value._value.recording)
        keys.mark(lambda _: self._filled.step)
        return result

    @uninterrupted
    def append_attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int = 0, *, mask: Tensor | None = None
    ) -> Tensor:
        """`append`, then `attend`: of one token and up to 1,024 positions in one launch of a GPU.

        Args:
            q: as for `attend`; k, v: as for `append`; mask: over [.., tokens, capacity].

        Returns:
            [batch, heads, tokens, value_dim].

        Raises:
            ShapeError, DTypeError, KVCacheFullError, ContractError: as these do; nothing changes.
        """
        self._operands.check(k, v, layer)
        check_tensors("append_attend", q)
        self._operands.check_queries(q, k.shape[2])
        step = self._layers[layer].step
        y = self._append(k.shape[2], layer, lambda starts: step(q, k, v, starts, mask))
        return self._operands.values_of(y)

    @uninterrupted
    def write(self, position: int, k: Tensor, v: Tensor, layer: int = 0) -> None:
        """Overwrite keys and values from a position on; lengths stay as they are.

        Raises:
            ShapeError: not all of it lies within every sequence.
        """
        self._operands.check(k, v, layer)
        shortest = min(self.lengths)
        start = whole("write", "a position", position)
        if start > shortest - k.shape[2]:
            raise ShapeError(
                f"write: expected {k.shape[2]} positions among the {shortest} that are filled, got "
                f"a start of {start}"
            )
        self._layers[layer].write(k, v, full((self.shape[0],), start, i32, self.device))

    @uninterrupted
    def take(self, other: KVCache, at: Tensor) -> None:
        """Hold what sequences of another cache hold, in place of what is here.

        Args:
            other: of the same layers, heads and sizes. All are as long here as its longest one:
                `truncate` cuts the others.
            at: [batch] i32, which of its sequences each one here is.

        Raises:
            ShapeError, DTypeError, DeviceError, KVCacheFullError: it does not fit; nothing changes.
            ContractError: its step is unfinished, or a layer has no content: after the first one
                this cache is empty.
        """
        if other.device is not self.device:
            raise DeviceError(f"take: expected {self.device.name}, got {other.device.name}")
        self._operands.check_taken(other._operands, other.lengths, at)
        tokens = max(other._begun(other._filled, 0).ends)  # unless a step is unfinished
        for layer, source in enumerate(other._layers):
            try:
                k, v = source.rows(lambda x: gather(x[:, :, :tokens], at))
            except BaseException:
                if layer:
                    self.truncate(0)
                raise
            if not layer:  # what cannot be read changes nothing
                self.truncate(0)
            if tokens:
                self.append(*other._operands.narrowed(k, v), layer)

    @uninterrupted
    def truncate(self, length: int | Iterable[int]) -> None:
        """Forget what comes after a length, of all sequences or of each: what a rollback needs.

        Raises:
            ShapeError: longer than what is there.
        """
        batch = self.shape[0]
        each = length if isinstance(length, Iterable) else (length,) * batch
        wanted = integers("truncate", "lengths", (each,))
        self._filled.cut(wanted)
        if len(set(wanted)) == 1:
            lengths = full((batch,), wanted[0], i32, self.device)
        else:
            lengths = asarray(list(wanted), i32, self.device)
        apply_all(get("cache_step"), (self._steps.value, lengths), {"tokens": 0})
        self._steps.mark(lambda filled: filled.cut(wanted))

    @uninterrupted
    def reset(self) -> None:
        """Zeros everywhere, as after a failure that left no content; memory stays.

        `truncate(0)` forgets as much and writes only the lengths.
        """
        self._steps.assign(full((), 0, i32, self.device))
        for layer in self._layers:
            layer.reset()
        self._steps.mark(lambda filled: filled.cut((0,) * self.shape[0]))

    def states(self, layer: int = 0) -> tuple[Tensor, ...]:
        """Keys and values of a layer, each of the cache's shape; zeros fill the narrower rows.

        In i8 their numbers, then the scales of both, f32 [batch, num_kv_heads, capacity, 2]. Past
        the lengths their content is undefined.
        """
        self._operands.check_layer(layer)
        return self._layers[layer].stored

    def attend(
        self, q: Tensor, layer: int = 0, *, scale: float | None = None,
        mask: Tensor | None = None, window: int | None = None, softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of this step's queries over the past and themselves, causally, in one op.

        Args:
            q: [batch, heads, tokens, head_dim], heads a multiple of `num_kv_heads`.
            scale: default 1 / sqrt(head_dim).
            mask: over [.., tokens, capacity], as `ct.attention` takes it.
            window: a query sees the last `window` keys alone, its own included.
            softcap, sinks: as for `ct.attention`.

        Returns:
            [batch, heads, tokens, value_dim].

        Raises:
            ContractError: the layer has not been given this step's keys and values.
            ShapeError, DTypeError: as for `ct.attention`.
        """
        self._operands.check_layer(layer)
        check_tensors("attend", q)
        if not self._has(layer):
            raise ContractError(
                f"attend: layer {layer} has no keys and values of this step; append them first"
            )
        self._operands.check_queries(q, self._filled.tokens)
        if window is not None and whole("attend", "window", window, 1) >= self.capacity:
            window = None  # all keys are within it
        y = self._layers[layer].attend(
            q, starts=self.positions, scale=scale, mask=mask, window=window, softcap=softcap,
            sinks=sinks,
        )  # fmt: skip
        return self._operands.values_of(y)
