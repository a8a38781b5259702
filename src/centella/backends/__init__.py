"""Backends move bytes and run programs; none has heard of softmax.

cpu.py        NumPy formulas on one worker thread
simulator.py  the kernel simulator, unchecked or checked
webgpu.py     WGSL through wgpu
cuda.py       PTX through cuda-core
"""
