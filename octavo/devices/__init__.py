"""One folder per kind of device: its operators, attention backend, sampler and recording of steps.

May import torch, octavo.ops, octavo.attention, octavo.sampling and the compiled library. Used by the worker; operators
are found by `ops.registry.bind()`, which lists the `ops` folder of its device and takes the `IMPLEMENTATIONS` of each
file.
"""
