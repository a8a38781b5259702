"""Texts to vectors: batches by length, one upload, one submission and one download each.

The model is captured once for each size of batch and replayed after that, so that recording its
operations costs a batch nothing.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from centella.dtypes import f32
from centella.errors import DTypeError, ShapeError, WeightsError
from centella.host.log import logger
from centella.ledger.counts import began, noted
from centella.nn.tree import Tree
from centella.runtime.pending import Pending
from centella.tensors.arguments import flag, refuse_names, whole
from centella.tensors.functional import l2_normalize, mean_pool
from centella.tensors.jit import Jitted
from centella.tensors.tensor import Tensor
from centella.weights.folder import TOKENIZER, max_length, read_modules
from centella.weights.model_files import inside, kind, read_json, show

if TYPE_CHECKING:
    from centella.models import BertModel
    from centella.tasks.text import Tokenizer


Array = np.ndarray[Any, Any]
POOLINGS = ("mean", "cls")
STEP = 16  # lengths are rounded up to multiples of this, so that few plans are built
CAPTURES = 40  # sizes of batches that the model is kept captured for
IN_FLIGHT = 2  # batches that the device holds while the host prepares the next


class EmbedderConfig(Struct, frozen=True):
    """How token states become a vector.

    Attributes:
        max_length: tokens that a text is cut at, special ones counted.
        pooling: "mean" over the text's tokens, or "cls": the first token's state.
        normalize: whether vectors have length 1.
        lower_case: whether texts are lower-cased before they are tokenised.
    """

    max_length: int
    pooling: str = "mean"
    normalize: bool = False
    lower_case: bool = False

    @classmethod
    def from_folder(cls, folder: str | PathLike[str]) -> EmbedderConfig:
        """Read `modules.json` and what it names; without it: mean, not normalised.

        Raises:
            WeightsError: a module or pooling that this library does not have.

        Source: the folder format of sentence-transformers.
        """
        root = Path(folder)
        pooling, normalize = "mean", False
        for module in read_modules(root):
            kind = str(module.get("type", "")).rpartition(".")[2]
            if kind == "Pooling":
                where = inside(root, module.get("path", ""), f"{root / 'modules.json'}: path")
                pooling = _pooling(where / "config.json")
            elif kind == "Normalize":
                normalize = True
            elif kind != "Transformer":
                raise WeightsError(
                    f"{root / 'modules.json'}: expected modules Transformer, Pooling, Normalize, "
                    f"got {show(module.get('type'))}"
                )
        lower = bool(read_json(root / "sentence_bert_config.json").get("do_lower_case", False))
        return cls(max_length(root), pooling, normalize, lower)


class Forward:
    """Ids and lengths of a batch to vectors, captured for each size of batch.

    Attributes:
        captured: (ids [b, l] i32, lengths [b] i32, normalize) to [b, dim].
    """

    def __init__(self, model: BertModel, config: EmbedderConfig) -> None:
        def embed(ids: Tensor, lengths: Tensor, normalize: bool) -> Tensor:
            return _pooled(config, model(ids, lengths), lengths, normalize)

        self._of = (model, config)
        self._tree = Tree(model)
        self.captured: Jitted[..., Tensor] = Jitted(embed, model.device, CAPTURES)

    def stands_for(self, model: BertModel, config: EmbedderConfig) -> bool:
        """Whether it is still what these do: captures hold the parameters that there were."""
        return self._of == (model, config) and not self._tree.changed


class Embedder:
    """A model that turns texts into vectors; `ct.load` makes it. Threads may share one.

    Attributes:
        model: the encoder; calling the Embedder calls it.
        config: length limit (`config.max_length` tokens), pooling, normalisation.
    """

    def __init__(
        self, model: BertModel, tokenizer: Tokenizer | Path, config: EmbedderConfig
    ) -> None:
        if config.pooling not in POOLINGS:
            raise ShapeError(
                f"Embedder: expected pooling {' or '.join(POOLINGS)}, got {config.pooling!r}"
            )
        flag("Embedder", "config.normalize", config.normalize)
        whole("Embedder", "config.max_length", config.max_length, 1)
        if not isinstance(tokenizer, Path):
            tokenizer.check_pad_id(model.config.vocab_size)
        self.model = model
        self._tokenizer = tokenizer  # a Path: the file that the model's folder lacks
        self.config = config
        self._told_of_cut = False
        self._forward: Forward | None = None

    def __repr__(self) -> str:
        return f"Embedder({type(self.model).__name__}, dim={self.dim}, {self.model.device!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The model's token states: `embedder(ids, lengths)`."""
        return self.model(*args, **kwargs)

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids.

        Raises:
            WeightsError: the model's folder has none.
        """
        if isinstance(self._tokenizer, Path):
            raise WeightsError(f"{self._tokenizer}: expected a tokenizer, got no such file")
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def dim(self) -> int:
        """Numbers in a vector."""
        return self.model.config.hidden_size

    def encode(
        self, texts: str | Iterable[str], batch_size: int = 32, normalize: bool | None = None,
        progress: bool | Callable[[int, int], None] = False, **other: Never,
    ) -> Array:  # fmt: skip
        """Vectors of texts.

        A text is cut at `config.max_length` tokens, special ones counted; what comes after has no
        part in its vector. The first that is cut is logged as a warning.

        Args:
            texts: one text, or any number of them (a list, a generator).
            batch_size: most texts in one batch on the device.
            normalize: whether vectors have length 1; None: as the model's folder says.
            progress: show how far it is: a bar where rich is installed, else log lines; or a
                function that is called with the number of texts done, and of all.

        Returns:
            float32 [number of texts, dim], in the order of the texts; [dim] for one `str`.

        Raises:
            DTypeError: for what is no text, no whole number, no flag; for an unknown argument.
            ShapeError: for a batch_size below 1, or a text with a lone surrogate.
            WeightsError: for a token that the model has no vector for.
        """
        refuse_names("encode", other)
        batch_size = whole("encode", "batch_size", batch_size, 1)
        wanted = self._normalized("encode", normalize)
        if not callable(progress):
            progress = flag("encode", "progress", progress)
        ids = self._tokenize([texts] if isinstance(texts, str) else _listed(texts))
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]), reverse=True)
        vectors = np.empty((len(ids), self.dim), np.float32)
        running: deque[tuple[list[int], Pending[Array]]] = deque()
        done = 0
        with _progress(len(ids), progress) as tell:

            def finish() -> None:
                nonlocal done
                rows, pending = running.popleft()
                vectors[rows] = pending.result()[: len(rows)]
                done += len(rows)
                tell(done, len(ids))

            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                running.append((rows, self._submit([ids[i] for i in rows], batch_size, wanted)))
                if len(running) == IN_FLIGHT:
                    finish()
            while running:
                finish()
        return vectors[0] if isinstance(texts, str) else vectors

    def warm(self) -> None:
        """Embed a text of one word: programs are compiled, and memory is allocated."""
        self.encode("warm")

    def pool(self, states: Tensor, lengths: Tensor, normalize: bool | None = None) -> Tensor:
        """Token states [b, l, dim] and lengths [b] i32 to vectors [b, dim]."""
        return _pooled(self.config, states, lengths, self._normalized("pool", normalize))

    def _normalized(self, op: str, asked: bool | None) -> bool:
        """Whether vectors get length 1: as asked, or as the folder says."""
        return self.config.normalize if asked is None else flag(op, "normalize", asked)

    def _tokenize(self, texts: list[Any]) -> list[list[int]]:
        begin = began()
        if self.config.lower_case:
            texts = [t.lower() if isinstance(t, str) else t for t in texts]
        ids = self.tokenizer.encode(texts, self.config.max_length)
        self.tokenizer.check_ids(ids, self.model.config.vocab_size)
        if not self._told_of_cut:
            self._tell_of_cut(texts, ids)
        noted("tokenise", begin, texts=len(texts))
        return ids

    def _tell_of_cut(self, texts: list[str], ids: list[list[int]]) -> None:
        most = self.config.max_length
        for index, (text, found) in enumerate(zip(texts, ids, strict=True)):
            if len(found) < most or (whole := len(self.tokenizer.encode([text])[0])) <= most:
                continue
            logger("embed").warning(
                "encode: texts[%d] has %d tokens, of which the model reads %d (config.max_length); "
                "further texts that are cut are not reported", index, whole, most,
            )  # fmt: skip
            self._told_of_cut = True
            return

    def _submit(
        self, ids: Sequence[Sequence[int]], batch_size: int, normalize: bool
    ) -> Pending[Array]:
        """Start one batch: rows and columns are rounded up, what is added has length 0."""
        rows = min(batch_size, 1 << (len(ids) - 1).bit_length())
        longest = max(map(len, ids))
        columns = max(1, min(-(-longest // STEP) * STEP, self.config.max_length))
        padded = np.full((rows, columns), self.tokenizer.pad_id or 0, np.int32)
        lengths = np.zeros(rows, np.int32)
        for row, tokens in enumerate(ids):
            padded[row, : len(tokens)] = tokens
            lengths[row] = len(tokens)
        forward = self._forward
        if forward is None or not forward.stands_for(self.model, self.config):
            forward = self._forward = Forward(self.model, self.config)
        return forward.captured.fetch(padded, lengths, normalize)


def read_embedder(folder: Path, vocab_size: int) -> Callable[[BertModel], Embedder]:
    """Read what an Embedder has beside its model, which the function returned takes.

    Raises:
        WeightsError: a file that is malformed.
        MissingExtraError: the folder has a tokenizer, and its library is not installed.
    """
    from centella.tasks.text import Tokenizer

    config = EmbedderConfig.from_folder(folder)
    file = folder / TOKENIZER
    absent = kind(file) == "nothing at that path"
    tokenizer = file if absent else Tokenizer.from_folder(folder, vocab_size)

    def embedder(model: BertModel) -> Embedder:
        most = min(config.max_length, model.config.positions)
        return Embedder(model, tokenizer, replace(config, max_length=most))

    return embedder


def _pooled(config: EmbedderConfig, states: Tensor, lengths: Tensor, normalize: bool) -> Tensor:
    first = config.pooling == "cls"
    pooled = (states[:, 0] if first else mean_pool(states, lengths)).astype(f32)
    if normalize:
        return l2_normalize(pooled)
    return pooled.contiguous()  # of a first token: its own memory, not that of all states


def _pooling(file: Path) -> str:
    """The one pooling that is on: `pooling_mode`, or a flag for each in older folders."""
    config = read_json(file)
    named = config.get("pooling_mode")
    flags = [k.removeprefix("pooling_mode_") for k, v in config.items() if v is True]
    modes = [named] if isinstance(named, str) else [f.removesuffix("_tokens") for f in flags]
    modes = ["cls" if m == "cls_token" else m for m in modes if m != "include_prompt"]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        got = show(", ".join(map(str, modes)) or "none")[1:-1]
        raise WeightsError(f"{file}: pooling: expected one of {', '.join(POOLINGS)}, got {got}")
    return modes[0]


def _listed(texts: Any) -> list[Any]:
    if isinstance(texts, (bytes, Mapping)) or not isinstance(texts, Iterable):
        raise DTypeError(f"encode: expected str or an iterable of str, got {type(texts).__name__}")
    return list(texts)


@contextmanager
def _progress(
    total: int, show: bool | Callable[[int, int], None]
) -> Iterator[Callable[[int, int], None]]:
    """What is called with texts done and of all: the caller's own, a bar of rich, or log lines."""
    if not show:
        yield lambda done, total: None
        return
    if callable(show):
        yield show
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield partial(logger("embed").info, "encoded %d of %d texts")
        return
    # What rich draws with in a notebook.
    drawn = None if importlib.util.find_spec("ipywidgets") else False
    with Progress(console=Console(stderr=True, force_jupyter=drawn)) as bar:
        task = bar.add_task("encode", total=total)
        yield lambda done, total: bar.update(task, completed=done)
