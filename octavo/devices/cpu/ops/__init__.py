"""CPU kernels: thin wrappers around the compiled library, one file per group of operators, named as in octavo.ops.

May import torch, octavo.ops and octavo._native. Read by `ops.registry`, which lists the files.
"""
