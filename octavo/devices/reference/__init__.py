"""Plain torch: the attention backend and the sampler that define the right results.

May import torch, octavo.ops, octavo.attention and octavo.sampling. Used by octavo.devices and by tests.
"""
