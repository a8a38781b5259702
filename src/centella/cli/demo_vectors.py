"""Vectors of the demo's passages, kept in the user's cache folder from one start to the next.

A file holds those of one folder, model and kind of device: a SHA-256 digest, then the numbers. The
digest is of the numbers and of all that they depend on, so that a stale file and a broken one read
alike, as none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np
from msgspec import Struct

from centella import __version__
from centella.cli.loading import device_kind
from centella.dtypes import Array
from centella.host.caches import keep, kept
from centella.tasks.embed.embedder import Embedder
from centella.weights.fingerprint import fingerprint

DIGEST = 32  # bytes
MOST = 1 << 26  # bytes of vectors that are kept: 40 000 passages of MiniLM


class PassageVectors(Struct, frozen=True):
    """Where vectors of passages are kept, and what they depend on.

    Attributes:
        name: of the file in the cache folder.
        about: model files, texts, dtypes, device and version, as JSON.
        shape: [number of passages, dim].
    """

    name: str
    about: bytes
    shape: tuple[int, int]

    @classmethod
    def of(
        cls, embedder: Embedder, model: str | PathLike[str], folder: Path, texts: Sequence[str]
    ) -> PassageVectors:
        """Those that an Embedder, loaded from `model`, gives for the texts of a folder.

        Raises:
            WeightsError: a file of the model cannot be read.
        """
        device = device_kind(embedder.model.device)
        about = {
            "centella": __version__,
            "device": device,
            "dtypes": sorted({w.dtype.name for w in embedder.model.state_dict().values()}),
            "model": fingerprint(model),
            "texts": list(texts),
        }
        path = json.dumps([str(Path(model).resolve()), str(folder.resolve()), device])
        name = f"demo/{_digest(path.encode('utf-8', 'surrogatepass')).hex()[:32]}.vectors"
        return cls(name, json.dumps(about).encode(), (len(texts), embedder.dim))

    def read(self) -> Array | None:
        """The vectors, f32 [number of passages, dim]; None where the file has not these."""
        content = kept(self.name) or b""
        numbers = content[DIGEST:]
        whole = len(numbers) == 4 * self.shape[0] * self.shape[1]
        if not whole or content[:DIGEST] != _digest(self.about + numbers):
            return None
        return np.frombuffer(numbers, "<f4").reshape(self.shape)

    def write(self, vectors: Array) -> None:
        """Keep the vectors, f32 [number of passages, dim], unless they are larger than `MOST`."""
        numbers = np.ascontiguousarray(vectors, "<f4").tobytes()
        if len(numbers) <= MOST:
            keep(self.name, _digest(self.about + numbers) + numbers)


def _digest(content: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(content).digest()
