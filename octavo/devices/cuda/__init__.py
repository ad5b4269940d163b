"""The device cuda: kernels in Triton, products by cuBLAS or in Triton. Triton is imported only when a kernel is run.

May import torch, triton, octavo.ops, octavo.attention and octavo.devices.reference.
Used by octavo.devices, by name.
"""
