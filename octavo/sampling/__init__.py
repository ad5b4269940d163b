"""From logits to drawn tokens: processors, temperature, filters, the draw, log-probabilities.

May import torch, numpy and core. Used by devices, structured_output and the worker.
"""
