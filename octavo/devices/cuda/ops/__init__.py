"""Operators on CUDA: each file states `IMPLEMENTATIONS`, which are made from a `CudaRuntime`.

May import torch, octavo.ops and octavo.devices.cuda.
Used by octavo.devices.cuda.runtime, by name.
"""
