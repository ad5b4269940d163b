"""From logits to drawn tokens: processors, temperature, filters, the draw, log-probabilities.

Used by devices, structured_output and the worker.
"""
