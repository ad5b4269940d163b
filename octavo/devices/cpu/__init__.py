"""The CPU with compiled kernels: runtime, attention, sampler, recorded steps; operators in `ops`.

Used by octavo.devices.
"""
