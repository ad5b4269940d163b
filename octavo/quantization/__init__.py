"""How a weight is stored and multiplied: the protocol, and one file per format.

Used by layers, which work the same with every format.
"""
