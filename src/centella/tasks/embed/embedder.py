"""Texts to vectors: batches by length, one upload, one submission and one download each.

The model is captured once for each size of batch and replayed after that, so that recording its
operations costs a batch nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from msgspec.structs import replace

from centella.dtypes import Array
from centella.errors import ContractError, ShapeError
from centella.host.event_loop import in_thread
from centella.ledger.counts import began, noted
from centella.nn import Linear
from centella.runtime.pending import Pending
from centella.tasks.embed.embeddings import Embeddings, Rows, pieces_of, tell_of_cut, texts_cut
from centella.tasks.embed.forward import DENSE, Forward, vectors_of
from centella.tasks.embed.pooling import Dense, EmbedderConfig
from centella.tasks.embed.replicas import Replicas
from centella.tasks.embed.vectors import DTYPES, packed, similarity
from centella.tasks.text.batches import (
    Batch,
    Progress,
    batches_of,
    exact_tokens,
    expect_tokenizer,
    listed,
    portions,
    progress_of,
    rows_of,
    run_batches,
    threads_ahead,
)
from centella.tasks.text.check_texts import checked_texts
from centella.tasks.text.chunks import Chunk, Chunker, prepared
from centella.tasks.text.tokens import FIRST, Tokens
from centella.tensors.arguments import (
    check_called,
    check_progress,
    flag,
    one_of,
    refuse_names,
    whole,
)
from centella.tensors.hints import Hinted
from centella.tensors.tensor import Tensor

if TYPE_CHECKING:
    from centella.models.bert import BertModel
    from centella.tasks.text.tokenizer import Tokenizer

Outputs = dict[str, Array]

__all__ = ["Embedder", "EmbedderConfig", "Forward"]


class Embedder(Hinted):
    """A model that turns texts into vectors; `ct.load` returns it. Threads may share one.

    Attributes:
        model: the encoder; calling the Embedder calls it.
        config: length limit (`config.max_length`, in tokens), pooling, normalisation, prompts.
        dense: linear layers after the pooling.
        heads: linear layers of the outputs for each token, by name: "sparse", "multi".
    """

    def __init__(
        self, model: BertModel, tokenizer: Tokenizer | Path, config: EmbedderConfig,
        dense: Sequence[Dense] = (), heads: Mapping[str, Linear] | None = None,
    ) -> None:  # fmt: skip
        config.check()
        if not isinstance(tokenizer, Path):
            tokenizer.check_pad_id(model.config.vocab_size)
        self.model = model
        self._tokenizer = tokenizer  # a Path: the file that the model's folder lacks
        self.config = config
        self.dense: tuple[Dense, ...] = tuple(dense)
        self.heads: dict[str, Linear] = dict(heads or {})
        self.replicas = ()
        self._told_of_cut = False
        self._forward: Forward | None = None

    def __repr__(self) -> str:
        devices = ", ".join(repr(e.model.device) for e in (self, *self.replicas))
        return f"Embedder({type(self.model).__name__}, dim={self.dim}, {devices})"

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The model's token states: `embedder(ids, lengths)`."""
        check_called("Embedder", args, "model.encode(texts) embeds texts")
        return self.model(*args, **kwargs)

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids.

        Raises:
            WeightsError: the model's folder has none.
        """
        return expect_tokenizer(self._tokenizer)

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def replicas(self) -> tuple[Embedder, ...]:
        """The copies of the model on further devices, which share the batches of each call.

        They use this `config`. They have their own `model`, `dense` and `heads`. If you change
        those of this Embedder, change those of each replica too, then set `replicas` again.
        """
        return self._replicas.others

    @replicas.setter
    def replicas(self, replicas: tuple[Embedder, ...]) -> None:
        self._replicas = Replicas("encode", self, replicas)

    @property
    def dim(self) -> int:
        """Numbers in a vector."""
        return self.config.width(self.model.config.hidden_size)

    def encode(
        self, texts: str | Iterable[str], batch_size: int = 32, normalize: bool | None = None,
        progress: bool | Callable[[int, int], None] = False, *, prompt: str | None = None,
        prompt_name: str | None = None, dim: int | None = None, dtype: str = "f32",
        ranges: Any = None, exact: bool = False, chunk: int | None = None, overlap: int = 0,
        **other: Never,
    ) -> Array:  # fmt: skip
        """Vectors of texts.

        A text is cut at `config.max_length` tokens, special tokens included; the rest does not
        affect its vector. The first call that cuts texts logs a warning; `embed` names them.

        Args:
            texts: one text, or any number of them (a list, a generator).
            batch_size: most texts in one batch on the device.
            normalize: whether vectors have length 1; None: as the model's folder says.
            progress: True shows a progress bar if rich is installed, otherwise log lines. A
                function is called with the number of texts done and of all texts.
            prompt: put before each text; or prompt_name: that prompt of the folder
                (`config.prompts`). Default: the folder's `default_prompt_name`, if it has one.
            dim: keep the first `dim` numbers of each vector (Kusupati et al. 2022, "Matryoshka
                Representation Learning"). Vectors are normalised after the cut.
            dtype: "f32"; "f16"; "int8", "uint8": 255 steps between the smallest and the largest
                value of each dimension; "binary", "ubinary": one bit for each value, set if it is
                above 0, eight bits a byte.
            ranges: [2, dim], the smallest and largest values for int8 and uint8; default: those of
                these vectors.
            exact: a text gets the same bits in every batch and at every position, on one device or
                several of one kind. All batches of a length then have one size, about 2 048 tokens
                (on a CPU one text), and `batch_size` is ignored. A single text takes as long as a
                full batch, and many texts take longer than in large batches.
            chunk: a text with more than `chunk` tokens, special tokens and the prompt included, is
                embedded in pieces (`chunks`). Its vector is the mean of the pieces' vectors,
                weighted by their numbers of tokens, and normalised if those are. None: the text is
                cut.
            overlap: tokens of a piece that the next piece repeats.

        Returns:
            float32, or as `dtype` says, [number of texts, dim], in the order of the texts; [dim]
            for one `str`; of bits [.., ceil(dim / 8)].

        Raises:
            DTypeError: an argument of another type (texts, numbers, flags), or an unknown one.
            ShapeError: a batch_size below 1, a dim larger than the vectors', an unknown dtype or
                prompt, a text with a lone surrogate, a chunk that is empty or longer than the model
                reads, or an overlap as long as a chunk.
            WeightsError: a token outside the model's vocabulary.
            ContractError: several devices, and `model`, `dense` or `heads` of one was changed.
        """
        refuse_names("encode", other)
        embeddings = self._embedded(
            texts, batch_size, normalize, progress, prompt=prompt, prompt_name=prompt_name, dim=dim,
            dtype=dtype, ranges=ranges, exact=exact, chunk=chunk, overlap=overlap,
        )  # fmt: skip
        if embeddings.cut and not self._told_of_cut:
            tell_of_cut(embeddings)
            self._told_of_cut = True
        return embeddings.dense[0] if isinstance(texts, str) else embeddings.dense

    async def encode_async(
        self, texts: str | Iterable[str], *, progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> Array:  # fmt: skip
        """`encode` in a thread of asyncio's; raises the same errors.

        Cancelling the task ends it after the batches that run. Several tasks may share the model;
        `centella.serving.Batcher` gathers their texts into batches.

        Args:
            texts, options: as for `encode`, by name; progress: a function, called in that thread.
        """
        ending = threading.Event()

        def told(done: int, total: int) -> None:
            if ending.is_set():
                raise ContractError("encode_async: the task was cancelled")
            if progress is not None:
                progress(done, total)

        check_progress("encode_async", progress)
        return await in_thread(partial(self.encode, texts, progress=told, **options), ending)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What `embed` can give: "dense", and where the folder has them "sparse" and "multi"."""
        return (*DENSE, *self.heads)

    def embed(
        self, texts: str | Iterable[str], outputs: Sequence[str] = DENSE, **options: Any
    ) -> Embeddings:  # fmt: skip
        """The outputs of texts, and which texts were cut.

        Args:
            texts: as for `encode`; one `str` is a list of one.
            outputs: one or several of `self.outputs`: "dense": vectors; "sparse": weights of
                tokens; "multi": a vector for each token. All come from one pass of the model.
            options: of `encode`, by name; `dim`, `dtype` and `normalize` are of dense vectors.

        Raises:
            ShapeError: another output, or none; CentellaError: as `encode`.
        """
        names = listed("embed", outputs)
        if not names:
            raise ShapeError("embed: expected one or more outputs, got none")
        for name in names:
            one_of("embed", "outputs", name, self.outputs)
        return self._embedded(texts, outputs=tuple(dict.fromkeys(names)), **options)

    def _embedded(
        self, texts: str | Iterable[str], batch_size: int = 32, normalize: bool | None = None,
        progress: Progress = False, *, prompt: str | None = None, prompt_name: str | None = None,
        dim: int | None = None, dtype: str = "f32", ranges: Any = None, exact: bool = False,
        chunk: int | None = None, overlap: int = 0, outputs: tuple[str, ...] = DENSE,
        **other: Never,
    ) -> Embeddings:  # fmt: skip
        refuse_names("embed", other)
        begin = self.config.prompt("encode", prompt_name, prompt)
        kept = self.config.kept(dim, self.dim)
        one_of("encode", "dtype", dtype, DTYPES)
        batch_size = whole("encode", "batch_size", batch_size, 1)
        wanted = self.config.normalizes("encode", normalize)
        progress = progress_of("encode", progress)
        cut = None if chunk is None else self._chunker("encode", begin, chunk, overlap)
        pieces = pieces_of(listed("encode", texts), overlap, cut)
        read = checked_texts(prepared(pieces.texts, begin, self.config.lower_case))
        rows = Rows(len(read), outputs, kept or self.dim, self.tokenizer)
        most, pad = self.config.max_length, self.tokenizer.pad_id or 0
        room = exact_tokens(self.model.device) if flag("encode", "exact", exact) else 0
        every: dict[int, Tokens] = {}  # by their first text

        def tokenized(part: slice) -> Tokens:
            tokens = every[part.start] = self._tokenize(read[part])
            return tokens

        parts = [partial(tokenized, part) for part in portions(len(read))]
        devices = (where.model.device for where in (self, *self.replicas))
        threads = threads_ahead(devices) if len(parts) > 1 else 1

        def submit(where: Embedder, batch: Batch) -> Pending[Outputs]:
            size = rows_of(batch.columns(most, exact), room) if room else batch_size
            return where._submit(batch, size, pad, exact, wanted, kept, outputs)

        batches = batches_of(parts, batch_size, most, room, threads)
        if self.replicas and read:
            few = len(read) <= batch_size
            self._replicas.run(self, batches, len(read), submit, rows.take, progress, few)
        else:
            run_batches(batches, len(read), partial(submit, self), rows.take, progress)
        embeddings = rows.joined(
            pieces, wanted, texts_cut([every[first] for first in sorted(every)], pieces.owners)
        )
        if "dense" not in outputs or dtype == "f32":
            return embeddings
        return replace(embeddings, dense=packed(embeddings.dense, dtype, ranges))

    def chunks(
        self, text: str, size: int | None = None, overlap: int = 0, *, prompt: str | None = None,
        prompt_name: str | None = None,
    ) -> list[Chunk]:  # fmt: skip
        """Split a text into pieces that the model reads whole, as `encode(chunk=size)` does.

        A piece has at least half of `size` tokens. It ends after a line if possible, otherwise
        after a sentence, otherwise after a word. White space around a piece is left out.

        Args:
            text: the text; a text that fits is one piece.
            size: most tokens of a piece, special ones and the prompt counted; default:
                `config.max_length`.
            overlap: tokens of a piece that the next piece repeats, beginning at a word if possible.
            prompt, prompt_name: as for `encode`; the tokens of the prompt are counted in `size`.

        Returns:
            The pieces, each with its characters (`start`, `end`) and tokens.

        Raises:
            DTypeError: not a text. ShapeError: a size or overlap that `encode` refuses.
        """
        begin = self.config.prompt("chunks", prompt_name, prompt)
        chunker = self._chunker("chunks", begin, size, overlap)
        return list(chunker.chunks(text, chunker.counts([text])[0]))

    def _chunker(self, op: str, prompt: str, size: int | None, overlap: int) -> Chunker:
        c = self.config
        tokens = c.max_length if size is None else size
        return Chunker(op, self.tokenizer, c.lower_case, prompt, c.max_length, tokens, overlap)

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
        """Similarity of texts, f32 [n, m], from two outputs of `embed` or `encode` of one kind.

        Args:
            a, b: dense vectors [n, dim] and [m, dim], or one [dim]: as the folder says
                (`config.similarity`); lists of sparse weights: the sum of the products of those
                that both texts have; lists of multi vectors [tokens, dim]: of each token of `a` the
                largest product with a token of `b`, and the mean of these. A dict is the sparse
                weights of one text; an empty list is no text, of either kind.

        Raises:
            ShapeError: outputs of two kinds, or vectors of unequal lengths.
            DTypeError: vectors of dtype "int8", "uint8", "binary" or "ubinary".
        """
        return similarity(a, b, self.config.similarity)

    def warm(self) -> None:
        """Embed a text of one word on each device: programs are compiled, memory is allocated.

        A device that fails is named in the log, and the others go on, as in `encode`.

        Raises:
            CentellaError: as `encode`: no device is left.
        """
        config = self.config
        prompt = config.prompt("warm", None, None)
        tokens = self._tokenize(checked_texts(prepared(["warm"], prompt, config.lower_case)))
        pad = self.tokenizer.pad_id or 0

        def submit(where: Embedder, batch: Batch) -> Pending[Outputs]:
            return where._submit(batch, 1, pad, False, config.normalize, None, DENSE)

        batch = Batch(tokens, FIRST, FIRST)
        if self.replicas:
            self._replicas.run_on_each(self, batch, submit)
        else:
            submit(self, batch).result()

    def pool(self, states: Tensor, lengths: Tensor, normalize: bool | None = None) -> Tensor:
        """Token states [b, l, dim] and lengths [b] i32 to vectors [b, dim]."""
        wanted = self.config.normalizes("pool", normalize)
        return vectors_of(self.config, self.dense, states, lengths, wanted, None)

    def _tokenize(self, texts: list[str]) -> Tokens:
        """Ids of texts, cut at the most that the model reads."""
        begin = began()
        tokens = self.tokenizer.tokens_of(texts, self.config.max_length)
        self.tokenizer.check_ids(tokens, self.model.config.vocab_size)
        noted("tokenise", begin, texts=len(texts))
        return tokens

    def _submit(
        self, batch: Batch, size: int, fill: int, exact: bool, normalize: bool, dim: int | None,
        outputs: tuple[str, ...],
    ) -> Pending[Outputs]:  # fmt: skip
        """Start a batch of at most `size` texts."""
        work = batch, size, self.config.max_length, fill, exact, normalize, dim, outputs
        if (forward := self._forward) is not None and forward.is_of(self):
            pending = forward.start(*work)
            if not forward.changed:  # asked while the device computes
                return pending
        self._forward = Forward(self)
        return self._forward.start(*work)
