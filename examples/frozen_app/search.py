"""A program to freeze: the sentence nearest to a question, by MiniLM and a kernel of its own.

python examples/frozen_app/search.py [QUESTION] [--device cpu|webgpu|cuda]
pyinstaller examples/frozen_app/search.spec && dist/search/search
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import centella as ct
from centella import lang

SENTENCES = (
    "The kettle is boiling in the kitchen.",
    "Interest rates went up by half a point.",
    "A dog chased the ball across the park.",
    "The train to the coast leaves at noon.",
)
BUNDLED = Path(__file__).parent / "minilm"  # where search.spec puts the model


@ct.kernel(workgroup=64)
def scores(
    vectors: ct.In[ct.f32, 2], question: ct.In[ct.f32], out: ct.Out[ct.f32], rows: ct.u32,
    dim: ct.u32,
) -> None:  # fmt: skip
    """The product of each vector with the question's, a thread a vector."""
    row = lang.global_id()
    with lang.if_(row < rows):
        total = lang.var(0.0, ct.f32)
        for d in lang.range(0, dim, 1):
            total += vectors[row, d] * question[d]
        out[row] = total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="Where is the pet?")
    parser.add_argument("--device", help="of the kernel; default: what centella info says")
    options = parser.parse_args()

    frozen = getattr(sys, "frozen", False)
    model = ct.load(BUNDLED if frozen else "minilm")
    device = ct.device(options.device)
    vectors = ct.asarray(model.encode(SENTENCES), device=device)
    question = ct.asarray(model.encode(options.question), device=device)
    out = ct.empty(len(SENTENCES), device=device)
    scores(vectors, question, out, rows=len(SENTENCES), dim=model.dim, threads=len(SENTENCES))
    found = out.numpy()
    print(f"{'frozen' if frozen else 'not frozen'}: model on {model.model.device.name}, "
          f"kernel on {device.name}")  # fmt: skip
    for i in found.argsort()[::-1]:
        print(f"{found[i]:.3f}  {SENTENCES[i]}")


if __name__ == "__main__":
    main()
