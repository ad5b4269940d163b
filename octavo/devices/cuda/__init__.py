"""The device cuda: kernels in Triton, products by cuBLAS or in Triton. Triton is imported only when a kernel is run.

Used by octavo.devices, by name.
"""
