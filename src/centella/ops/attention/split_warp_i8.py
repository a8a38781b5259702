"""A warp of the decoding kernels over rows of i8: sixteen numbers a load (PTX alone).

As `split_warp`, with these differences:

- Numbers become f16 or bf16 in registers, exactly, where a product takes them; nothing wide is
  written. Of 64 elements thread `4 g + c` loads 16 c to 16 c + 15 of key g, and 16 g to 16 g + 15
  of 128 of a value.
- A score is multiplied by the scale of its key, in f32, and a weight by the scale of its value; so
  weights are the sum of two bf16 numbers whatever q is, since f16 has no exponents for their
  products. The sum of weights is that of weights as they were, in two parts as well.
- Numbers are finite whatever memory holds, so no row is looked at twice: what a weight or a query
  of 0 hides stays hidden. Scales may be NaN, and are hidden with their scores and weights.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from centella import lang
from centella.dtypes import bf16, f32, i8
from centella.lang.ptx import Fragment
from centella.lang.values import Operand
from centella.op.op import Form
from centella.ops.attention import split_warp
from centella.ops.attention.parts import Work
from centella.ops.attention.problem import AttentionAttrs, rows_of_16_bits
from centella.ops.attention.split_warp import MOST_DIM, RowSource, Warp
from centella.ops.attention.warp_sums import CHAINS, SplitTile
from centella.ops.attention.weights import put
from centella.specs import Caps


def tile_of(form: Form[AttentionAttrs], caps: Caps) -> SplitTile | None:
    """The tile of rows of 16 bits or of i8, in whole chunks."""
    dim = form.inputs[0].shape[3]
    chunks = dim <= MOST_DIM and dim % i8.per_chunk == 0
    if chunks and caps.tensor_cores and rows_of_16_bits(form, (i8,)):
        return SplitTile()
    return split_warp.tile_of(form, caps)


def warp_of(work: Work, dim: int, q: Any, k: Any) -> Warp:
    """A warp for the rows that keys and values are."""
    return (WarpI8 if k.dtype is i8 else Warp)(work, dim, q.dtype)


class WarpI8(Warp):
    """A warp's sixteen keys of i8 and their values, with the scales of each.

    Args:
        dim: elements of a head; dtype: of q, f16 or bf16.
    """

    plain: list[Fragment]  # weights without scales
    key_scales: Any  # of the keys of the scores
    coming: Any  # of the keys that are loaded
    value_scales: Any

    def __init__(self, work: Work, dim: int, dtype: Any) -> None:
        super().__init__(work, dim, dtype, i8.per_chunk)
        self.ones: Fragment = self.exact
        self.weights: list[Fragment] = [Fragment(bf16, (16, 8)) for _ in range(2)]
        self.plain = [Fragment(bf16, (16, 8)) for _ in range(2)]
        self.values_of: Fragment = Fragment(bf16, (16, 16))
        self.key_scales, self.coming, self.value_scales = (lang.vars(f32, 2, 2) for _ in range(3))

    def load_keys(self, first: Any, source: RowSource, since: Any = None) -> None:
        """As of `Warp`, with the scales of the keys whose scores are this thread's."""
        super().load_keys(first, source, since)
        self._load_scales(self.coming, first, 0)

    def load_values(self, first: Any, source: RowSource, since: Any = None) -> None:
        """As of `Warp`, with the scales of the same values."""
        super().load_values(first, source, since)
        self._load_scales(self.value_scales, first, 1)

    def _load_scales(self, into: Any, first: Any, which: int) -> None:
        scale_of, last = self.work.lines.scales(first)[which], self.work.end - 1
        for n in range(2):
            for e in range(2):
                into[n][e].set(scale_of(lang.minimum(self.key(first, n, e), last)))

    def score(self) -> None:
        """The products of the queries and the numbers of the keys that are loaded.

        Their scales are kept: those of the next keys are loaded before these are wanted.
        """
        for scale, loaded in zip(chain(*self.key_scales), chain(*self.coming), strict=True):
            scale.set(loaded)
        self.clear_scores()
        for i, query in enumerate(self.queries):
            for n, chains in enumerate(self.scores):
                word = self.keys[n][i // 4][i % 4]
                self.keys_of[0], self.keys_of[1] = lang.ptx.widen_i8(word, self.dtype)
                lang.ptx.mma_sync(chains[i % CHAINS], query, self.keys_of)

    def product(self, n: int, e: int, scale: Operand) -> Any:
        """Register e of scores n, times the scale of its key and the factor of scores."""
        return super().product(n, e, self.key_scales[n][e] * scale)

    def weigh(self, n: int, both: list[Any]) -> None:
        """Keep the weights of two keys, and each times the scale of its value."""
        put(self.plain, n, both)
        pairs = zip(both, self.value_scales[n], strict=True)
        put(self.weights, n, [lang.select(w == 0.0, 0.0, w * scale) for w, scale in pairs])

    def mix(self, counted: list[list[Any]]) -> None:
        """Add up the numbers of the values, and the weights."""
        for weights in self.plain:
            lang.ptx.mma_sync(self.total, self.ones, weights)
        for part, tiles in enumerate(self.out):
            for word in range(4):
                wide = [
                    [lang.ptx.widen_i8(self.values[n][e][part][word], bf16) for e in range(2)]
                    for n in range(2)
                ]
                for half in range(2):
                    for n, (low, next_) in enumerate(wide):
                        a, b = low[half], next_[half]
                        self.values_of[2 * n] = (a & 0xFFFF) | (b << 16)
                        self.values_of[2 * n + 1] = (a >> 16) | (b & 0xFFFF0000)
                    for weights in self.weights:
                        lang.ptx.mma_sync(tiles[2 * word + half], self.values_of, weights)
