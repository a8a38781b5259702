"""Backends move bytes and run programs; none has heard of softmax.

cpu.py        NumPy formulas on one worker thread
simulator.py  the kernel simulator, unchecked or checked
webgpu/       WGSL through wgpu
cuda/         PTX through the driver's Python bindings
"""
