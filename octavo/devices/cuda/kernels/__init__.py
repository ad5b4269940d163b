"""Kernels in Triton, which is imported with them.

May import triton alone.
Used by octavo.devices.cuda.
"""
