"""The products of bge-m3 for sparse and multi-vector outputs, small and random, by torch.save.

    python tests/reference/heads.py

Writes `tests/data/heads/`: sparse_linear.pt [1, 30] and colbert_linear.pt [20, 30], both f16, for
the encoder in `tests/data/encoders/xlm-roberta`; views.pt: tensors of every dtype, two of which
share a storage, and views.npz with the same numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

FOLDER = Path(__file__).resolve().parents[1] / "data" / "heads"
KINDS = {
    "f32": torch.float32, "f16": torch.float16, "f64": torch.float64, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(3)
    for name, rows in (("sparse_linear", 1), ("colbert_linear", 20)):
        torch.save(torch.nn.Linear(30, rows).half().state_dict(), FOLDER / f"{name}.pt")
    values = torch.tensor([[0, 1, 1], [1, 0, 1]])
    tensors = {name: values.to(kind) for name, kind in KINDS.items()}
    whole = torch.arange(12, dtype=torch.float32)
    tensors |= {"whole": whole, "part": whole[4:10].reshape(2, 3), "one": torch.tensor(7.0)}
    tensors["parameter"] = torch.nn.Parameter(torch.ones(4))
    np.savez_compressed(FOLDER / "views.npz", **{n: t.detach().numpy() for n, t in tensors.items()})
    tensors["bf16"] = values.to(torch.bfloat16)
    torch.save(tensors, FOLDER / "views.pt")


if __name__ == "__main__":
    main()
