"""From logits to drawn tokens: processors, temperature, filters, the draw, log-probabilities.

May import torch, numpy, ops and core. Used by devices, structured_output and the worker.
"""
