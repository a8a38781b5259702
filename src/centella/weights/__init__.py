"""Model files: bytes on disk to named host tensors. Knows no model and no device."""

from centella.weights.checkpoint import Checkpoint, open_checkpoint
from centella.weights.safetensors import StoredTensor, read_file

__all__ = ["Checkpoint", "StoredTensor", "open_checkpoint", "read_file"]
