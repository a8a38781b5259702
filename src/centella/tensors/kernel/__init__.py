"""`ct.kernel`: a user's kernel, launched like an op, on every backend.

    @ct.kernel(workgroup=256)
    def scale(x: ct.In[ct.f32], y: ct.Out[ct.f32], n: ct.u32, s: ct.f32):
        i = lang.global_id()
        with lang.if_(i < n):
            y[i] = x[i] * s

    scale(x, y, n=x.size, s=2.0, threads=x.size)

On a GPU it is compiled; on the CPU the simulator computes it and checks bounds only. `simulate`
checks everything.
"""

from centella.tensors.kernel.user import UserKernel, kernel

__all__ = ["UserKernel", "kernel"]
