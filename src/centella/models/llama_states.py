"""A decoder without its head, as embedders have it: ids to the state of each token.

Queries see the keys of the tokens before them, all of which are there: no cache is kept. Padding
follows a text, whose tokens see none of it, so a text has the same states in every batch.
"""

from __future__ import annotations

from msgspec.structs import replace

from centella.dtypes import DType, f32
from centella.errors import ShapeError
from centella.models.llama import LlamaModel, Past, Tables
from centella.models.llama_config import LlamaConfig
from centella.nn.one_pass import OnePass
from centella.runtime.device import Device
from centella.tensors.arguments import check_tensors
from centella.tensors.tensor import Tensor

__all__ = ["LlamaConfig", "LlamaStates"]

LEAST = 64  # positions of rotary tables, of which there are those of few capacities


class LlamaStates(LlamaModel):
    """Token ids to normalised states; a checkpoint's head is ignored."""

    def __init__(self, config: LlamaConfig, dtype: DType = f32) -> None:
        super().__init__(replace(config, tie_word_embeddings=True), dtype)
        self._turns: dict[tuple[Device, int], tuple[tuple[Tables, ...], Tables]] = {}

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]  # states
        """ids [batch, seq_len] i32, lengths [batch] i32 to states [batch, seq_len, hidden].

        Raises:
            ShapeError: ids of another rank, or longer than the model has positions.
        """
        check_tensors("LlamaStates", ids, lengths)
        most = self.config.positions
        if ids.ndim != 2 or ids.shape[1] > most:
            raise ShapeError(
                f"LlamaStates: expected ids [batch, up to {most}], got {list(ids.shape)}"
            )
        c = self.config
        cache = OnePass(c.num_key_value_heads, c.head_dim)
        past = Past(cache, *self.turns(ids.shape[1], ids.device))
        return self.norm(self.states(ids, past))

    def turns(self, seq_len: int, device: Device) -> tuple[tuple[Tables, ...], Tables]:
        """What `rotary` gives for texts of a length, sent to a device once."""
        capacity = min(max(1 << (seq_len - 1).bit_length(), LEAST), self.config.positions)
        key = device, capacity
        if key not in self._turns:
            self._turns[key] = self.rotary(capacity, device)
        return self._turns[key]
