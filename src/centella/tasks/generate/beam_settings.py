"""How texts are searched for by beams, and what does not go with that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from centella.errors import DTypeError, ShapeError
from centella.ops.beam import THREADS
from centella.tasks.generate.sampling import Sampling
from centella.tensors.arguments import real, whole
from centella.weights.model_files import show

MOST = 16  # beams
STEEPEST = 50  # length penalty: above, the power of a long text's length may be no number
CANDIDATES = THREADS  # of a prompt and step
EarlyStopping: TypeAlias = "bool | Literal['never']"


class BeamSettings(Struct, frozen=True):
    """How texts are searched for.

    Attributes:
        beam: texts that are followed at once, and most that are kept of those that have ended.
        length_penalty: a text's score is the sum of its log-probabilities, the end's included,
            over its tokens to this power.
        early_stopping: True: the search ends with the `beam`-th text that ends. False: if no text
            that runs would better the worst that is kept, if it ended now; "never": if none would
            at any length up to the longest.
    """

    beam: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def score(self, total: float, tokens: int) -> float:
        """The score of a text by its log-probabilities, added up."""
        return total / math.pow(tokens, self.length_penalty)

    def candidates(self, ends: int) -> int:
        """Candidates of a step, among which `beam` have not ended.

        Args:
            ends: tokens that end a text.
        """
        return max(2, 1 + ends) * self.beam

    @classmethod
    def of(
        cls, op: str, beam: object, length_penalty: object, early_stopping: Any, n: int
    ) -> BeamSettings | None:
        """Arguments, checked; None for one beam.

        Args:
            n: texts that are asked for, of each prompt.

        Raises:
            DTypeError: what is no number, or no way to stop; ShapeError: one out of its range, more
                texts than beams, or a length penalty or a way to stop without beams.
        """
        count = whole(op, "beam", beam, 1)
        penalty = real(op, "length_penalty", length_penalty)
        never = isinstance(early_stopping, str) and early_stopping == "never"
        if not isinstance(early_stopping, bool) and not never:
            raise DTypeError(
                f'{op}: early_stopping: expected True, False or "never", got {show(early_stopping)}'
            )
        if count > MOST:
            raise ShapeError(f"{op}: beam: expected 1 to {MOST}, got {count}")
        if not abs(penalty) <= STEEPEST:
            raise ShapeError(
                f"{op}: length_penalty: expected {-STEEPEST} to {STEEPEST}, got {penalty}"
            )
        if count == 1:
            if penalty != 1.0 or early_stopping is not False:
                name = "length_penalty" if penalty != 1.0 else "early_stopping"
                raise ShapeError(f"{op}: {name}: expected beam of 2 or more with it, got beam=1")
            return None
        if n > count:
            raise ShapeError(
                f"{op}: n: expected up to {count} texts, one for each of beam={count}, got {n}"
            )
        return cls(count, penalty, early_stopping)


def refuse_beside_beams(
    op: str, beams: BeamSettings, sampling: Mapping[str, Any], draft: object, ends: int
) -> None:
    """Refuse what does not go with beams.

    Args:
        sampling: as the user gave it; ends: tokens that end a text.

    Raises:
        ShapeError: settings of sampling, a draft, or more candidates than are chosen at once.
    """
    plain, why = Sampling(), f"beam={beams.beam} follows the likeliest texts"
    for name, value in sampling.items():
        if value != getattr(plain, name):
            raise ShapeError(
                f"{op}: {name}: expected {getattr(plain, name)} with beams, got {value}; {why}"
            )
    if draft is not None:
        raise ShapeError(f"{op}: draft: expected None with beams, got one; {why}")
    if beams.candidates(ends) > CANDIDATES:
        raise ShapeError(
            f"{op}: beam: expected up to {CANDIDATES // max(2, 1 + ends)} with {ends} tokens that "
            f"end a text, got {beams.beam}"
        )
