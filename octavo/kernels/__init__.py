"""Fast implementations of operators, one folder per device, file names as in octavo.ops.

May import torch, octavo.ops and the compiled library. Read only by `ops.registry.bind()`, which lists the folder of its
device and takes the `IMPLEMENTATIONS` of each file.
"""
