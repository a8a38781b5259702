"""Modules: attributes are the parameter tree.

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            self.up = nn.Linear(384, 1536)
            self.down = nn.Linear(1536, 384)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x, activation="gelu"), residual=x)

Its parameters are `up.weight`, `up.bias`, `down.weight`, `down.bias`. Modules in a list, tuple or
dict are part of the tree, as `layers.0` and `heads.name`. A module is made without data;
`load_parameters` takes a checkpoint's tensors, each by the path of its attribute, and `state_dict`
gives them.
"""

from centella.nn.attention import CrossAttention, SelfAttention, join_heads, split_heads
from centella.nn.blocks import ConvFrontend, DecoderBlock, EncoderBlock
from centella.nn.layers import Conv1d, Embedding, LayerNorm, Linear, RMSNorm
from centella.nn.module import Module, Parameter, parameter
from centella.nn.stored import Stored

__all__ = [
    "Conv1d",
    "ConvFrontend",
    "CrossAttention",
    "DecoderBlock",
    "Embedding",
    "EncoderBlock",
    "LayerNorm",
    "Linear",
    "Module",
    "Parameter",
    "RMSNorm",
    "SelfAttention",
    "Stored",
    "join_heads",
    "parameter",
    "split_heads",
]
