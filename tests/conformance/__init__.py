"""Compiled kernels against their references, at every instruction set that this machine can run."""
