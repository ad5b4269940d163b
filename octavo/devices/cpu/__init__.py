"""The CPU with compiled kernels: runtime, attention, sampler, recorded steps; operators in `ops`.

May import torch, octavo.ops, octavo.attention, octavo.sampling and octavo._native. Used by octavo.devices.
"""
