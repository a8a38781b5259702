"""Scaled dot-product attention without a score matrix in memory.

    y_i = sum_j p_ij v_j     p_ij = softmax_j(scale q_i . k_j + mask_ij)

over the keys j that count: j < lengths[b], key_mask[b, j], j <= p of p = i + starts[b] (or
i + Lk - Lq when causal), |p - j| < window, and mask_ij > -2^119 (so -inf hides a key); of a bool
mask True is 0 and False hides. With a cap c the scaled product is c tanh(scale q_i . k_j / c); a
sink is one more score of a head, of a value 0 (Xiao et al. 2023). The softmax is kept up while keys
stream by (Milakov and Gimelshein 2018; Dao et al. 2022). A query with no key gives zeros. q has a
multiple of the heads of k and v (grouped queries).

Each kernel is a file with an `AttentionVariant`, and `choice` walks the list of them: `wgmma` takes
f16 and bf16 on Hopper (Shah et al. 2024); `mma` takes queries sixteen at a time, in f16 and bf16 on
tensor cores (Dao 2023); `tiled` computes both products in register tiles through shared memory and
suits many queries; `stream` has a thread a query, and needs least of a device; `split` spreads the
keys of a few queries over many groups (Dao et al. 2023, Flash-Decoding) and combines them in a
second launch; `split_mma` does the same in f16 and bf16 on tensor cores, `cluster_mma` in one
launch, where clusters are wide enough. Keys and values may be rows of i8 with a scale each
(`ops/rows_i8.py`): `wgmma` and `mma` read those behind a launch that widens them (`plain_rows`),
the others as they are. Which register tiles suit which class of adapter is in `table`.
"""
