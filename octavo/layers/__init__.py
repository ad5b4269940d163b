"""The parts that models are written with. A layer has its mesh, its weight method and its names in the checkpoint.

May import torch, quantization, attention, ops and distributed. Used by models, which stay pure mathematics.
"""
