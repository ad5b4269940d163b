"""Operators: one file each with signature, plain-torch reference, example inputs and tolerance; `registry` binds them.

Devices are reached only through `bind()`. Used by layers.
"""
