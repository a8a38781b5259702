"""The weights of a model folder, in one file or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path

from centella.errors import WeightsError
from centella.weights.model_files import MAX_JSON, inside, is_file, kind, read_bytes, show
from centella.weights.safetensors import MAX_HEADER, StoredTensor, parse_object, read_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_LISTED = 20  # names that an error shows


class Checkpoint(Mapping[str, StoredTensor]):
    """The tensors of a model folder by name, in file order.

    Attributes:
        folder: the model folder.
        files: the files that hold the tensors.
    """

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        self.folder = folder
        self.files: tuple[Path, ...] = tuple(dict.fromkeys(t.file for t in tensors.values()))
        self._tensors = tensors

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return (
            f"Checkpoint({str(self.folder)!r}, tensors={len(self)}, "
            f"files={len(self.files)}, nbytes={self.nbytes})"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self._tensors.values())


def open_checkpoint(folder: str | PathLike[str]) -> Checkpoint:
    """Open the weights of a model folder; reads only the headers of the files.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and its shards; or,
            where it has none of these, `pytorch_model.bin` or its index and shards, of which
            nothing is run. The first of these that is there is taken. An index says which file a
            tensor comes from; a tensor of a shard that it does not list is left out.

    Returns:
        The tensors by name.

    Raises:
        WeightsError: no such file, or a malformed one; names file, tensor, expected, got.

    Source: the safetensors format; the index as transformers' `save_pretrained` writes it.
    """
    root = Path(folder)
    if kind(root) != "a folder":
        raise WeightsError(f"{root}: expected a model folder, got {kind(root)}")
    for single, index, read in ((SINGLE, INDEX, read_file), (TORCH, TORCH_INDEX, _read_torch)):
        if is_file(root / single):
            return Checkpoint(root, read(root / single))
        if is_file(root / index):
            return Checkpoint(root, _read_shards(root, index, read))
    raise WeightsError(f"{root}: expected {SINGLE} or {INDEX}, got {_content(root)}")


def _read_torch(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file of torch.save."""
    from centella.weights.torch_zip import read_torch

    return read_torch(file)


def _content(folder: Path) -> str:
    """The names in a folder, for an error."""
    try:
        names = sorted(p.name for p in folder.iterdir())
    except OSError as error:
        return f"a folder that cannot be read: {error.strerror}"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more or "an empty folder"


def _read_shards(
    root: Path, listed: str, read: Callable[[Path], dict[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    """The tensors that an index of the folder lists, each from its file."""
    index = root / listed
    try:
        suffix = "*.safetensors" if listed == INDEX else "*.bin"
        size = sum(f.stat().st_size for f in root.glob(suffix) if is_file(f))
    except OSError as error:
        raise WeightsError(f"{root}: cannot be read: {error}") from error
    raw = read_bytes(index, min(MAX_HEADER, MAX_JSON + size // 64))
    places = parse_object(index, raw, size).get("weight_map")
    if not isinstance(places, dict):
        raise WeightsError(f"{index}: weight_map: expected an object, got {show(places)}")
    files: dict[str, Path] = {}
    for name, shard in places.items():
        if not isinstance(shard, str) or shard in {"", ".", ".."} or "/" in shard:
            raise WeightsError(
                f"{index}: tensor {show(name)}: expected the name of a file in the folder, "
                f"got {show(shard)}"
            )
        if shard not in files:
            files[shard] = inside(root, shard, f"{index}: tensor {show(name)}")
    shards = {shard: read(file) for shard, file in files.items()}
    for name, shard in places.items():
        if name not in shards[shard]:
            raise WeightsError(
                f"{root / shard}: tensor {show(name)}: expected here by {listed}, "
                f"got a file without it ({len(shards[shard])} tensors)"
            )
    return {name: shards[shard][name] for name, shard in places.items()}
