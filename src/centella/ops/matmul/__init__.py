"""Matrix products: `matmul` and `linear`.

    matmul   C = alpha A B             A [..., m, k], B [..., k, n], either one transposed by view
    linear   Y = f(alpha (X W^T) scale + bias) + residual        X [..., k], W [n, k],
             a tensor or the planes of a quantised format (`ops.quant`)

Epilogues act on the f32 accumulator and are asked for by name.
"""
