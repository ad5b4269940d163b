"""How a weight is stored and multiplied: the protocol, and one file per format.

May import torch and octavo.ops. Used by layers, which work the same with every format.
"""
