"""A batch of an Embedder on its device: ids to vectors, and to what each token gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from centella.dtypes import Array, f32
from centella.nn import Module
from centella.nn.tree import Tree
from centella.runtime.pending import Pending
from centella.tasks.embed.pooling import OF_ROWS, Dense, EmbedderConfig, finished, pooled
from centella.tasks.embed.token_outputs import of_tokens
from centella.tasks.text.batches import Batch, on_cores
from centella.tensors.jit import Jitted
from centella.tensors.tensor import Tensor

if TYPE_CHECKING:
    from centella.tasks.embed.embedder import Embedder

CAPTURES = 40  # sizes of batches that the model is kept captured for
DENSE = ("dense",)


class Forward:
    """Ids and lengths of a batch to its outputs, captured for each size of batch.

    Attributes:
        captured: (ids [b, l] i32, lengths [b] i32, normalize, dim, outputs) to a dict of them:
            "dense" [b, dim], "sparse" [b, l], "multi" [b, l, dim].
        packed: (ids [tokens] i32, offsets [b + 1] i32, positions [tokens] i32, normalize, dim) of
            texts end to end to "dense"; None where the model or the pooling needs rows of padding.
        room: as `room_of`.
    """

    def __init__(self, embedder: Embedder) -> None:
        model, config, dense = embedder.model, embedder.config, tuple(embedder.dense)
        heads = dict(embedder.heads)

        def embed(
            ids: Tensor, lengths: Tensor, normalize: bool, dim: int | None,
            outputs: tuple[str, ...] = DENSE,
        ) -> dict[str, Tensor]:  # fmt: skip
            states = model(ids, lengths)
            by_output = {
                name: of_tokens(name, heads[name], states) for name in outputs if name in heads
            }
            if "dense" in outputs:
                by_output["dense"] = vectors_of(config, dense, states, lengths, normalize, dim)
            return by_output

        def packed(
            ids: Tensor, offsets: Tensor, positions: Tensor, normalize: bool, dim: int | None
        ) -> dict[str, Tensor]:
            states = model.end_to_end(ids, offsets, positions)
            return {"dense": vectors_of(config, dense, states, offsets, normalize, dim)}

        modes = {*config.pooling.split("+")}
        packs = hasattr(model, "end_to_end") and modes.issubset(OF_ROWS)
        self.packed: Jitted[..., dict[str, Tensor]] | None = (
            Jitted(packed, model.device, CAPTURES) if packs else None
        )
        self.room: int = room_of(model)
        self._config, self._parts = config, Parts(embedder)
        self.captured: Jitted[..., dict[str, Tensor]] = Jitted(embed, model.device, CAPTURES)

    def start(
        self, batch: Batch, size: int, most: int, fill: int, exact: bool, normalize: bool,
        dim: int | None, outputs: tuple[str, ...],
    ) -> Pending[dict[str, Array]]:  # fmt: skip
        """Start a batch: end to end where that is fewer tokens, else as a grid.

        Args:
            size, most, fill, exact: as `Batch.grid` takes them.
        """
        packed = self.packed if outputs == DENSE and not exact else None
        if packed is None or not batch.packs(size, most, self.room):
            grid = batch.grid(size, most, fill, exact)
            more = () if outputs == DENSE else (outputs,)
            return self.captured.fetch(*grid, normalize, dim, *more)
        return packed.fetch(*batch.end_to_end(size, fill), normalize, dim)

    def is_of(self, embedder: Embedder) -> bool:
        """Whether it is for that configuration, and for these modules."""
        config = embedder.config
        return (self._config is config or self._config == config) and self._parts.are_of(embedder)

    @property
    def changed(self) -> bool:
        """Whether a module was changed since: captures hold the parameters that there were."""
        return self._parts.changed


def room_of(model: Any) -> int:
    """Tokens end to end whose q, k and v are in one binding; 0 where texts need padding."""
    if not hasattr(model, "end_to_end") or on_cores(model.device):
        return 0
    return int(model.device.caps.max_binding // (model.config.qkv_width * f32.itemsize))


class Replicated(Protocol):
    """A task whose model may be on several devices; an Embedder has `dense` and `heads`, too."""

    model: Any
    config: Any


class Parts:
    """The modules that a task computes with, as they are now."""

    def __init__(self, task: Replicated) -> None:
        self._listed = _listed(task)
        self._trees = [Tree(part) for part in self._listed if isinstance(part, Module)]

    def are_of(self, task: Replicated) -> bool:
        """Whether it has the same."""
        return self._listed == _listed(task)

    @property
    def changed(self) -> bool:
        """Whether something in them was set since."""
        return any(tree.changed for tree in self._trees)


def _listed(task: Replicated) -> list[object]:
    heads = getattr(task, "heads", {})
    return [task.model, *getattr(task, "dense", ()), *heads, *heads.values()]


def vectors_of(
    config: EmbedderConfig, dense: Sequence[Dense], states: Tensor, lengths: Tensor,
    normalize: bool, dim: int | None,
) -> Tensor:  # fmt: skip
    """Token states [batch, seq_len, hidden] to vectors [batch, dim]."""
    x = pooled(config.pooling, states, lengths)
    for product in dense:
        x = product(x)
    return finished(x, dim, normalize)
