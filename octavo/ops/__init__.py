"""Operators: one file each with signature, plain-torch reference, example inputs and tolerance; `registry` binds them.

May import torch and octavo.platform; reaches octavo.devices only through `bind()`. Used by layers and sampling.
"""
