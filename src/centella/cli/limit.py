"""How near a decode step comes to what the device's memory allows."""

from __future__ import annotations

from centella.tasks.generate import Generator


def step_bytes(generator: Generator, tokens: float) -> float:
    """Bytes that a step of one sequence reads when its past has so many tokens.

    Each weight once, of experts those that a token goes to; keys and values of what a layer sees.
    """
    model, c = generator.model, generator.model.config
    share = c.num_experts_per_tok / c.num_experts if c.num_experts else 1.0
    weights = 0.0
    for name, weight in model.state_dict().items():
        if name == "embed_tokens.weight" and not c.tie_word_embeddings:
            continue  # a row of it
        weights += weight.nbytes * (share if ".experts." in name else 1.0)
    seen = sum(min(window, tokens) if window else tokens for window in c.windows)
    return weights + 2 * seen * c.num_key_value_heads * c.head_dim * model.dtype.itemsize


def line(generator: Generator, tokens: float, rate: float) -> str:
    """The share of the device's rate, which is measured once, that steps at `rate` a second use."""
    from centella.check.rates import copy_rate

    nbytes = step_bytes(generator, tokens)
    most = copy_rate(generator.model.device)
    return (
        f"memory: {nbytes / 1e6:,.1f} MB read a token, {nbytes * rate / 1e9:,.2f} GB/s: "
        f"{nbytes * rate / most:.1%} of the {most / 1e9:,.0f} GB/s that this device copies"
    )
