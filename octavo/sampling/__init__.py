"""From logits to drawn tokens: processors, temperature, filters, the draw, log-probabilities.

May import torch, numpy, core and errors. Used by the worker's model runner.
"""
