"""Plain torch: the attention backend and the sampler that say what is right.

May import torch, octavo.ops, octavo.attention and octavo.sampling. Used by octavo.devices and by tests.
"""
