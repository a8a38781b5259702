"""Texts to vectors: batches by length, one upload, one submission and one download each.

The model is captured once for each size of batch and replayed after that, so that recording its
operations costs a batch nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import numpy as np
from msgspec.structs import replace

from centella.errors import DTypeError, ShapeError, WeightsError
from centella.host.log import logger
from centella.ledger.counts import began, noted
from centella.nn.tree import Tree
from centella.runtime.pending import Pending
from centella.tasks.batches import (
    by_columns,
    by_length,
    columns_of,
    exact_tokens,
    grid,
    read_tokenizer,
    rows_of,
    run_batches,
)
from centella.tasks.pooling import Dense, EmbedderConfig, finished, pooled
from centella.tasks.vectors import DTYPES, packed, similarity
from centella.tensors.arguments import flag, one_of, refuse_names, whole
from centella.tensors.hints import embedder_getattr
from centella.tensors.jit import Jitted
from centella.tensors.tensor import Tensor
from centella.weights.model_files import is_file

if TYPE_CHECKING:
    from centella.models import BertModel
    from centella.tasks.text import Tokenizer


Array = np.ndarray[Any, Any]
__all__ = ["Embedder", "EmbedderConfig", "Forward", "read_embedder"]

CAPTURES = 40  # sizes of batches that the model is kept captured for


class Forward:
    """Ids and lengths of a batch to vectors, captured for each size of batch.

    Attributes:
        captured: (ids [b, l] i32, lengths [b] i32, normalize, dim) to [b, dim].
    """

    def __init__(self, embedder: Embedder) -> None:
        model, config, dense = embedder.model, embedder.config, embedder.dense

        def embed(ids: Tensor, lengths: Tensor, normalize: bool, dim: int | None) -> Tensor:
            return _vectors(config, dense, model(ids, lengths), lengths, normalize, dim)

        self._of = (model, config, dense)
        self._tree = Tree(model)
        self.captured: Jitted[..., Tensor] = Jitted(embed, model.device, CAPTURES)

    def stands_for(self, embedder: Embedder) -> bool:
        """Whether it is still what that does: captures hold the parameters that there were."""
        of = (embedder.model, embedder.config, embedder.dense)
        return self._of == of and not self._tree.changed


class Embedder:
    """A model that turns texts into vectors; `ct.load` makes it. Threads may share one.

    Attributes:
        model: the encoder; calling the Embedder calls it.
        config: length limit (`config.max_length` tokens), pooling, normalisation, prompts.
        dense: products after the pooling.
    """

    def __init__(
        self, model: BertModel, tokenizer: Tokenizer | Path, config: EmbedderConfig,
        dense: Sequence[Dense] = (),
    ) -> None:  # fmt: skip
        config.check()
        if not isinstance(tokenizer, Path):
            tokenizer.check_pad_id(model.config.vocab_size)
        self.model = model
        self._tokenizer = tokenizer  # a Path: the file that the model's folder lacks
        self.config = config
        self.dense: tuple[Dense, ...] = tuple(dense)
        self._told_of_cut = False
        self._forward: Forward | None = None

    def __repr__(self) -> str:
        return f"Embedder({type(self.model).__name__}, dim={self.dim}, {self.model.device!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The model's token states: `embedder(ids, lengths)`."""
        return self.model(*args, **kwargs)

    if not TYPE_CHECKING:  # which is to say itself what an Embedder has not

        def __getattr__(self, name: str) -> Any:
            return embedder_getattr(self, name)

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
        return self.config.width(self.model.config.hidden_size)

    def encode(
        self, texts: str | Iterable[str], batch_size: int = 32, normalize: bool | None = None,
        progress: bool | Callable[[int, int], None] = False, *, prompt: str | None = None,
        prompt_name: str | None = None, dim: int | None = None, dtype: str = "f32",
        ranges: Any = None, exact: bool = False, **other: Never,
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
            prompt: put before each text; or prompt_name: that prompt of the folder
                (`config.prompts`). Default: the folder's `default_prompt_name`, if it has one.
            dim: keep so many numbers of each vector, the first (Kusupati et al. 2022, "Matryoshka
                Representation Learning"); those that are normalised are so after the cut.
            dtype: "f32"; "f16"; "int8", "uint8": 255 steps between the least and the largest value
                of each dimension; "binary", "ubinary": a bit for each value over 0, eight a byte.
            ranges: [2, dim], those values for int8 and uint8; default: of these vectors.
            exact: the bits of a text's vector do not depend on the texts beside it, their number or
                its place, on one device. All batches of a length then have one size, about 2 048
                tokens (on a CPU one text), and `batch_size` says nothing: a text alone takes as
                long as such a batch, many take longer than in large ones.

        Returns:
            float32, or as `dtype` says, [number of texts, dim], in the order of the texts; [dim]
            for one `str`; of bits [.., ceil(dim / 8)].

        Raises:
            DTypeError: for what is no text, no whole number, no flag; for an unknown argument.
            ShapeError: for a batch_size below 1, a dim that vectors do not have, another dtype, a
                prompt that the folder does not have, or a text with a lone surrogate.
            WeightsError: for a token that the model has no vector for.
        """
        refuse_names("encode", other)
        begin = self.config.prompt("encode", prompt_name, prompt)
        kept = self._dim(dim)
        one_of("encode", "dtype", dtype, DTYPES)
        batch_size = whole("encode", "batch_size", batch_size, 1)
        wanted = self._normalized("encode", normalize)
        if not callable(progress):
            progress = flag("encode", "progress", progress)
        listed = [texts] if isinstance(texts, str) else _listed(texts)
        ids = self._tokenize(_prompted(begin, listed))
        vectors = np.empty((len(ids), kept or self.dim), np.float32)
        lengths, most = [len(tokens) for tokens in ids], self.config.max_length
        tokens = exact_tokens(self.model.device) if flag("encode", "exact", exact) else 0
        batches = by_columns(lengths, most, tokens) if tokens else by_length(lengths, batch_size)

        def submit(rows: list[int]) -> Pending[Array]:
            columns = columns_of(lengths[rows[0]], most)
            size = rows_of(columns, tokens) if tokens else batch_size
            grids = grid([ids[i] for i in rows], size, most, self.tokenizer.pad_id or 0, exact)
            return self._submit(*grids, wanted, kept)

        def take(rows: list[int], result: Array) -> None:
            vectors[rows] = result[: len(rows)]

        run_batches(batches, submit, take, progress)
        if dtype != "f32":
            vectors = packed(vectors, dtype, ranges)
        return vectors[0] if isinstance(texts, str) else vectors

    def encode_query(self, texts: str | Iterable[str], **options: Any) -> Array:
        """Vectors of questions: `encode` with the folder's prompt "query", if it has one.

        Args:
            options: of `encode`, by name.

        Raises:
            CentellaError: as `encode`.
        """
        return self._encode_as("encode_query", texts, ("query",), options)

    def encode_document(self, texts: str | Iterable[str], **options: Any) -> Array:
        """Vectors of texts to search: `encode` with the prompt "document", "passage" or "corpus".

        Args:
            options: of `encode`, by name.

        Raises:
            CentellaError: as `encode`.
        """
        return self._encode_as("encode_document", texts, ("document", "passage", "corpus"), options)

    def _encode_as(
        self, op: str, texts: str | Iterable[str], usual: tuple[str, ...], options: dict[str, Any]
    ) -> Array:
        name, text = options.pop("prompt_name", None), options.pop("prompt", None)
        return self.encode(texts, prompt=self.config.prompt(op, name, text, *usual), **options)

    def similarity(self, a: Any, b: Any) -> Array:
        """How alike vectors are, f32 [n, m], as the folder says (`config.similarity`).

        Args:
            a, b: [n, dim] and [m, dim]; or one vector [dim].

        Raises:
            ShapeError: vectors of unequal lengths.
        """
        return similarity(a, b, self.config.similarity)

    def warm(self) -> None:
        """Embed a text of one word: programs are compiled, and memory is allocated."""
        self.encode("warm")

    def pool(self, states: Tensor, lengths: Tensor, normalize: bool | None = None) -> Tensor:
        """Token states [b, l, dim] and lengths [b] i32 to vectors [b, dim]."""
        wanted = self._normalized("pool", normalize)
        return _vectors(self.config, self.dense, states, lengths, wanted, None)

    def _dim(self, asked: int | None) -> int | None:
        """Numbers that are kept of a vector, None for all."""
        if asked is None or whole("encode", "dim", asked, 1) == self.dim:
            return None
        if asked > self.dim:
            raise ShapeError(f"encode: expected dim of 1 to {self.dim}, got {asked}")
        return int(asked)

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
        self, ids: Array, lengths: Array, normalize: bool, dim: int | None
    ) -> Pending[Array]:
        """Start the batch of a `grid`."""
        forward = self._forward
        if forward is None or not forward.stands_for(self):
            forward = self._forward = Forward(self)
        return forward.captured.fetch(ids, lengths, normalize, dim)


def read_embedder(
    folder: Path, vocab_size: int, pooling: str | None = None
) -> Callable[[Any], Embedder]:  # fmt: skip
    """Read what an Embedder has beside its model, which the function returned takes.

    Args:
        pooling: of a folder without modules.json.

    Raises:
        WeightsError: a file that is malformed.
        MissingExtraError: the folder has a tokenizer, and its library is not installed.
    """
    config = EmbedderConfig.from_folder(folder)
    if pooling is not None and not is_file(folder / "modules.json"):
        config = replace(config, pooling=pooling)
    tokenizer = read_tokenizer(folder, vocab_size)

    def embedder(model: Any) -> Embedder:
        config.width(model.config.hidden_size)  # refuses now what does not fit
        most = min(config.max_length, model.config.positions)
        dense = [Dense.load(d, model.device) for d in config.dense]
        return Embedder(model, tokenizer, replace(config, max_length=most), dense)

    return embedder


def read_decoder_embedder(folder: Path, vocab_size: int) -> Callable[[Any], Embedder]:
    """As `read_embedder`; without modules.json a text is its last token's state."""
    return read_embedder(folder, vocab_size, "lasttoken")


def _vectors(
    config: EmbedderConfig, dense: Sequence[Dense], states: Tensor, lengths: Tensor,
    normalize: bool, dim: int | None,
) -> Tensor:  # fmt: skip
    x = pooled(config.pooling, states, lengths)
    for product in dense:
        x = product(x)
    return finished(x, dim, normalize)


def _prompted(prompt: str, texts: list[Any]) -> list[Any]:
    if not prompt:
        return texts
    return [prompt + text if isinstance(text, str) else text for text in texts]


def _listed(texts: Any) -> list[Any]:
    if isinstance(texts, (bytes, Mapping)) or not isinstance(texts, Iterable):
        raise DTypeError(f"encode: expected str or an iterable of str, got {type(texts).__name__}")
    return list(texts)
