"""Plain torch: the attention backend and the sampler that define the right results.

Used by octavo.devices and by tests.
"""
