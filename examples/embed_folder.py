"""Embed the text files of a folder, save the vectors, and find the files nearest to a question.

python examples/embed_folder.py [FOLDER] [--question Q] [--model minilm|DIR] [--device D] [--save F]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import centella as ct

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=DOCS)
    parser.add_argument("--question", default="Why was no GPU found?")
    parser.add_argument("--model", default="minilm", help="minilm, or a model folder")
    parser.add_argument("--device", help="default: what centella info says")
    parser.add_argument("--save", type=Path, help="a .npz file for names and vectors")
    options = parser.parse_args()

    found = sorted(f for f in options.folder.rglob("*") if f.suffix in (".md", ".txt"))
    read = {f: f.read_text(encoding="utf-8", errors="replace") for f in found if f.is_file()}
    read = {f: text for f, text in read.items() if text.strip()}  # an empty file means nothing
    files, texts = list(read), list(read.values())
    if not texts:
        raise SystemExit(f"{options.folder}: no .md or .txt file with text")

    model = ct.load(options.model, device=options.device)
    with ct.ledger() as led:
        vectors = model.encode(texts)  # each text is cut to the length that the model reads
        question = model.encode([options.question])[0]
    scores = vectors @ question
    print(f"{len(files)} files of {options.folder}, vectors {vectors.shape}, nearest to "
          f"{options.question!r}:")  # fmt: skip
    for i in scores.argsort()[::-1][:3]:
        print(f"  {scores[i]:.3f}  {files[i].relative_to(options.folder)}")
    print(f"ledger: {led}")
    if options.save:
        np.savez(options.save, names=[str(f) for f in files], vectors=vectors)


if __name__ == "__main__":
    main()
