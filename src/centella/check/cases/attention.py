"""The row of attention."""

from __future__ import annotations

import math
from typing import Any

from centella.check.cases.case import DEPTH, FLOATS, LAYOUTS, Case, In, Row, Shape


def attend(
    b: int, h: int, kv: int, lq: int, lk: int, d: int, *masks: str, values: str = "normal",
    causal: bool = False, layout: str = "plain", added: Shape | None = None, hidden: bool = False,
    seen: bool = False, window: int = 0, softcap: float = 0.0, variant: str = "", pool: int = 0,
    spread: int = 20, **options: Any,
) -> Case:  # fmt: skip
    """One attention case; `added` is the shape of the mask, which is of bools if `seen`.

    The bias is for distances up to `spread`. With a `pool` of so many blocks keys are in blocks of
    64, and `lk` is how many of them.
    """
    mask = ("bools", "bool") if seen else ("hidden" if hidden else "normal", "f32")
    keys = (kv, pool, 64, d) if pool else (b, kv, lk, d)
    q, k, v = (In(s, values, layout=layout) for s in ((b, h, lq, d), keys, keys))
    extra = {
        "lengths": In((b,), (0, lk + 2), "i32"),
        "key_mask": In((b, lk), "bools", "bool"),
        "mask": In(added or (b, h, lq, lk), *mask),
        "starts": In((b,), (-2, lk + 2), "i32"),
        "sinks": In((h,), "normal", "f32"),
        "bias": In((h, 2 * spread + 1), "normal", "f32"),
        "blocks": In((b, lk // 64), (-1, pool + 1), "i32"),
    }
    attrs = {"causal": causal, "masks": masks, "scale": 1 / math.sqrt(d)}
    chosen = {"window": window, "softcap": softcap, "variant": variant}
    attrs |= {name: value for name, value in chosen.items() if value}
    return Case((q, k, v, *(extra[m] for m in masks)), attrs, **options)


def attention() -> Row:
    """Self, cross, causal, grouped, each mask; rows with no key are zeros."""
    return Row(
        FLOATS,
        (
            attend(1, 1, 1, 1, 1, 4),
            attend(2, 3, 3, 5, 5, 5),
            attend(1, 2, 2, 2, 37, 8, causal=True),
            attend(1, 4, 2, 66, 66, 16, causal=True, small=False),
            attend(2, 4, 1, 3, 9, 32, "lengths"),
            attend(2, 2, 2, 5, 5, 3, "key_mask", causal=True),
            attend(2, 2, 1, 4, 20, 8, "mask"),
            attend(2, 2, 1, 4, 6, 8, "mask", added=(1, 2, 1, 6), hidden=True),
            attend(1, 1, 1, 3, 5, 4, "mask", added=(1, 1, 3, 1), hidden=True),
            attend(2, 2, 1, 4, 7, 8, "mask", added=(1, 1, 4, 7), seen=True),
            attend(2, 2, 2, 4, 9, 8, "lengths", "key_mask", "mask", causal=True),
            attend(1, 1, 1, 3, 5, 8, values="large"),
            attend(1, 1, 1, 3, 0, 4),
            attend(1, 2, 2, 0, 3, 4),
            attend(1, 2, 1, 70, 19, 67, small=False),
            attend(1, 1, 1, 3, 9, 128, small=False),
            attend(1, 1, 1, 130, 33, 32, small=False),
            *many_keys(),
            *(attend(2, 2, 1, 6, 7, 5, layout=x) for x in LAYOUTS[1:]),
            *(attend(1, 2, 2, 5, 9, 8, layout=x) for x in ("transposed", "rows", "offset")),
            attend(3, 2, 1, 4, 20, 8, "starts"),
            attend(2, 2, 2, 70, 80, 5, "lengths", "starts", small=False),
            attend(2, 2, 1, 4, 9, 8, "lengths", "key_mask", "mask", "starts"),
            attend(2, 4, 2, 40, 70, 40, "starts", variant="tiled"),
            attend(2, 2, 1, 9, 33, 5, "lengths", "key_mask", "mask", variant="tiled", causal=True),
            attend(2, 2, 1, 9, 33, 5, "mask", added=(2, 1, 9, 33), seen=True, variant="tiled"),
            attend(1, 1, 1, 3, 0, 4, variant="tiled", sweep=True, dtypes=("f32",)),
            attend(1, 1, 1, 3, 5, 8, values="large", variant="tiled", sweep=True, dtypes=("f32",)),
            attend(1, 2, 2, 9, 9, 8, layout="rows", variant="tiled", sweep=True, dtypes=("f16",)),
            *of_variants(),
            *sights(),
            *blocks(),
            *biases(),
            *(attend(2, 4, 2, 3, 70, d, "starts", variant=v, sweep=d not in (64, 128))
              for d in (1, 5, 16, 17, 40, 64, 80, 96, 128, 192, 256) for v in ("stream", "split")),
        ),
        sums=True,
    )  # fmt: skip


def sights() -> list[Case]:
    """Windows, caps and sinks of every variant, alone and together with masks."""
    rows: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("starts",), {"window": 20}),
        (("sinks",), {"window": 33, "causal": True, "sweep": True}),
        (("lengths", "sinks"), {"window": 5, "softcap": 1.5}),
        (("key_mask", "mask", "starts", "sinks"), {"window": 40, "softcap": 0.5}),
        ((), {"softcap": 2.0, "causal": True, "values": "large", "sweep": True}),
    ]  # fmt: skip
    return [
        attend(2, 6, 2, lq, 77, 24, *masks, variant=variant, **more)
        for variant, lq in (("stream", 9), ("split", 3), ("tiled", 9), ("mma", 19),
                            ("split_mma", 3), ("cluster_mma", 3), ("wgmma", 19))
        for masks, more in rows if variant != "wgmma" or "mask" not in masks
    ]  # fmt: skip


def blocks() -> list[Case]:
    """Keys in blocks, which sequences share; entries that are no block."""
    rows: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("starts",), {}),
        (("lengths",), {"layout": "pads", "sweep": True}),
        (("key_mask", "mask"), {"sweep": True}),
        (("starts", "sinks"), {"window": 70, "softcap": 1.5}),
    ]
    return [
        attend(3, 4, 2, lq, 192, d, *masks, "blocks", variant=variant, pool=5, **more)
        for variant, lq, d in (("stream", 9, 5), ("split", 3, 40), ("tiled", 9, 24),
                               ("mma", 19, 24), ("split_mma", 3, 72),
                               ("cluster_mma", 3, 72))
        for masks, more in rows
    ] + [
        attend(3, 4, 2, 3, 192, 80, *masks, "blocks", variant="ring", pool=5, **more)
        for masks, more in rows if "key_mask" not in masks
    ]  # fmt: skip


def biases() -> list[Case]:
    """A table by distance, as wide as the keys and narrower, alone and beside every other mask."""
    rows: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("bias",), {"spread": 90}),
        (("lengths", "bias"), {}),
        (("starts", "bias"), {"spread": 3, "sweep": True}),
        (("key_mask", "mask", "sinks", "bias"), {"causal": True, "softcap": 1.5, "sweep": True}),
        (("lengths", "bias"), {"window": 9, "sweep": True}),
    ]
    return [
        attend(2, 6, 2, lq, 77, 24, *masks, variant=variant, **more)
        for variant, lq in (("stream", 9), ("split", 3), ("tiled", 40), ("mma", 19),
                            ("split_mma", 3), ("cluster_mma", 3))
        for masks, more in rows
    ]  # fmt: skip


def many_keys() -> list[Case]:
    """More than a driver's loops may have rounds; all weigh the same, so that sums are exact."""
    keys = In((1, 1, DEPTH, 4)), In((1, 1, DEPTH, 4), (0, 7))
    attrs = {"causal": False, "masks": (), "scale": 0.5}
    return [Case((In((1, 1, n, 4), (0, 1)), *keys), attrs, ("f32",), small=False) for n in (2, 40)]


Sizes = tuple[int, int, int, int, int, int]
FORCED: dict[str, list[tuple[Sizes, tuple[str, ...], dict[str, Any]]]] = {
    "mma": [  # tiles begun and full, heads that are padded, every mask
        ((1, 1, 1, 1, 1, 16), (), {}),
        ((1, 2, 1, 33, 48, 32), (), {"sweep": True}),
        ((2, 4, 2, 18, 50, 20), ("lengths",), {"causal": True}),
        ((2, 2, 2, 35, 30, 64), ("starts",), {"sweep": True}),
        ((2, 2, 1, 17, 40, 8), ("key_mask",), {"causal": True, "sweep": True}),
        ((2, 2, 1, 17, 40, 16), ("mask",), {"added": (1, 2, 1, 40), "hidden": True}),
        ((2, 4, 2, 20, 40, 24), ("lengths", "key_mask", "mask", "starts"), {"sweep": True}),
        ((2, 2, 1, 17, 40, 16), ("mask",), {"added": (1, 2, 17, 40), "seen": True}),
        ((1, 1, 1, 19, 70, 40), (), {"values": "large", "sweep": True}),
        ((0, 2, 2, 20, 20, 16), (), {"sweep": True}),
        ((1, 2, 1, 130, 200, 128), (), {"small": False}),
        ((2, 2, 1, 300, 300, 64), ("lengths",), {"causal": True, "small": False}),
        ((1, 1, 1, 70, 90, 256), (), {"causal": True, "small": False}),
    ],
    "wgmma": [  # the same, with the masks that it takes
        ((1, 1, 1, 1, 1, 16), (), {}),
        ((2, 4, 2, 130, 300, 64), ("lengths",), {"causal": True, "small": False}),
        ((2, 2, 2, 70, 90, 40), ("starts",), {}),
        ((1, 1, 1, 70, 200, 72), (), {"values": "large", "sweep": True}),
        ((1, 2, 1, 300, 700, 128), (), {"small": False}),
        ((2, 2, 1, 200, 200, 128), ("lengths", "starts"), {"small": False, "sweep": True}),
    ],
    "split_mma": [  # warps without a key, parts without one, groups of heads
        ((1, 1, 1, 1, 1, 8), (), {}),
        ((3, 4, 1, 1, 150, 24), ("lengths",), {}),
        ((2, 6, 2, 3, 70, 64), ("starts",), {"sweep": True}),
        ((2, 2, 1, 2, 70, 40), ("lengths", "key_mask", "mask"), {"causal": True, "sweep": True}),
        ((2, 3, 1, 1, 70, 72), ("key_mask", "mask"), {"hidden": True, "sweep": True}),
        ((2, 3, 1, 2, 70, 40), ("mask",), {"added": (2, 1, 2, 70), "seen": True}),
        ((1, 1, 1, 1, 70, 16), (), {"values": "large", "sweep": True}),
        ((1, 32, 8, 1, 700, 128), ("lengths",), {"small": False}),
    ],
    "ring": [  # one part, parts without a key, rings that come round
        ((1, 1, 1, 1, 1, 16), (), {}),
        ((3, 4, 1, 1, 150, 48), ("lengths",), {}),
        ((2, 6, 2, 2, 700, 64), ("starts", "sinks"), {"window": 90, "softcap": 1.5}),
        ((1, 4, 2, 2, 6000, 128), ("lengths", "mask"), {"causal": True}),
        ((70, 4, 2, 1, 700, 80), ("lengths", "bias"), {"sweep": True}),
        ((1, 1, 1, 1, 600, 16), (), {"values": "large", "sweep": True}),
    ],
    "cluster_mma": [  # one part, parts without a key, eight parts
        ((1, 1, 1, 1, 1, 8), (), {}),
        ((3, 4, 1, 1, 150, 24), ("lengths",), {}),
        ((2, 6, 2, 3, 700, 64), ("starts",), {"sweep": True}),
        ((2, 2, 1, 2, 70, 40), ("lengths", "key_mask", "mask"), {"causal": True, "sweep": True}),
        ((2, 3, 1, 1, 70, 72), ("key_mask", "mask"), {"hidden": True, "sweep": True}),
        ((70, 4, 2, 1, 130, 16), ("lengths", "sinks"), {"sweep": True}),
        ((1, 1, 1, 1, 600, 16), (), {"values": "large", "sweep": True}),
        ((1, 32, 8, 1, 700, 128), ("lengths",), {"small": False}),
    ],
    "split": [  # parts with no key, groups of heads, every mask
        ((1, 1, 1, 1, 1, 4), (), {}),
        ((1, 1, 1, 1, 700, 8), (), {}),
        ((3, 2, 2, 1, 300, 16), ("lengths",), {}),
        ((3, 6, 2, 1, 260, 8), ("lengths", "starts"), {"sweep": True}),
        ((2, 8, 1, 2, 200, 8), ("key_mask",), {"causal": True, "sweep": True}),
        ((2, 5, 1, 1, 130, 8), ("mask",), {"hidden": True}),
        ((2, 2, 1, 4, 6, 8), ("mask",), {"added": (1, 2, 1, 6), "hidden": True}),
        ((2, 3, 3, 9, 140, 8), ("mask",), {"added": (2, 1, 9, 1)}),
        ((2, 3, 3, 2, 139, 8), ("mask",), {"added": (1, 3, 2, 139), "seen": True}),
        ((1, 2, 2, 8, 3, 8), (), {"causal": True, "sweep": True}),
        ((2, 2, 2, 4, 90, 8), ("lengths", "key_mask", "mask"), {"causal": True, "sweep": True}),
        ((2, 4, 2, 2, 90, 8), ("lengths", "key_mask", "mask", "starts"), {}),
        ((1, 1, 1, 3, 150, 8), (), {"values": "large", "sweep": True}),
        ((1, 1, 1, 3, 0, 4), (), {"sweep": True}),
        ((1, 2, 2, 0, 3, 4), (), {}),
        ((0, 2, 2, 1, 70, 4), (), {}),
        ((1, 4, 2, 1, 9000, 32), ("lengths",), {"small": False}),
    ],
}  # fmt: skip


def of_variants() -> list[Case]:
    """Cases that force a variant; views of operands where the keys are split."""
    all_cases = [
        attend(*sizes, *masks, variant=variant, **more)
        for variant, rows in FORCED.items() for sizes, masks, more in rows
    ]  # fmt: skip
    all_cases += [attend(2, 2, 1, 6, 77, 5, layout=x, variant="split") for x in LAYOUTS[1:]]
    return all_cases + [
        attend(1, 2, 2, 5, 70, 8, layout=x, variant="split", sweep=True) for x in LAYOUTS[1:]
    ]
