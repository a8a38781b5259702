"""How near decode steps come to what the device's memory allows."""

from __future__ import annotations

from msgspec import Struct

from centella.errors import CentellaError
from centella.tasks.generate.generator import Generation, Generator
from centella.tasks.generate.speculation import GUESSES


class Memory(Struct, frozen=True):
    """What steps read of the device's memory.

    Attributes:
        bytes_per_token: read for a token.
        bytes_per_second: read in a second.
        share: of the rate at which the device copies.
    """

    bytes_per_token: float
    bytes_per_second: float
    share: float

    def line(self) -> str:
        """One line of numbers."""
        most = self.bytes_per_second / self.share
        return (
            f"memory: {_digits(self.bytes_per_token / 1e6)} MB read a token, "
            f"{_digits(self.bytes_per_second / 1e9)} GB/s: {self.share:.1%} of the "
            f"{_digits(most / 1e9)} GB/s that this device copies"
        )


def _digits(number: float) -> str:
    """A number with three digits or more."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def step_bytes(
    generator: Generator, past: float, cache: str | None = None, tokens: int = 1
) -> float:
    """Bytes that a step of one sequence reads when its past has so many tokens.

    Each weight once, of experts those that a token goes to; keys and values of what a layer sees.

    Args:
        cache: as `generate` takes it.
        tokens: that the step verifies at once; each goes to experts of its own.
    """
    model, c = generator.model, generator.model.config
    share = 1 - (1 - c.num_experts_per_tok / c.num_experts) ** tokens if c.num_experts else 1.0
    weights = 0.0
    for name, weight in model.state_dict().items():
        if name == "embed_tokens.weight" and not c.tie_word_embeddings:
            continue  # a row of it
        weights += weight.nbytes * (share if ".experts." in name else 1.0)
    seen = sum(min(window, past) if window else past for window in c.windows)
    row = c.head_dim * model.dtype.itemsize if cache is None else c.head_dim + 4  # and its scale
    return weights + 2 * seen * c.num_key_value_heads * row


def token_bytes(
    generator: Generator, past: float, cache: str | None, draft: Generator | str | None,
    done: Generation,
) -> float:  # fmt: skip
    """Bytes that are read for a token of a continuation, whose guesses some steps have verified."""
    passes, step = done.guessed / GUESSES, step_bytes(generator, past, cache)
    if not passes or not done.ids:
        return step
    alone = max(len(done.ids) - passes - done.accepted, 0.0)
    total = alone * step + passes * step_bytes(generator, past, cache, GUESSES + 1)
    if isinstance(draft, Generator):
        total += passes * (GUESSES + 1) * step_bytes(draft, past)
    return total / len(done.ids)


def memory(generator: Generator, nbytes: float, rate: float) -> Memory | None:
    """What tokens of so many bytes at `rate` a second read; None where no copy can be measured."""
    from centella.check.rates import copy_rate

    try:
        most = copy_rate(generator.model.device, above=nbytes * rate)
    except CentellaError:  # the model has left no room for it
        return None
    return Memory(nbytes, nbytes * rate, nbytes * rate / most)
