"""The device cuda: kernels in Triton, products by cuBLAS or in Triton. Triton is imported only when a kernel is run.

May import torch, triton, ops, attention, sampling, devices and what every room may import.
Used by octavo.devices, by name.
"""
