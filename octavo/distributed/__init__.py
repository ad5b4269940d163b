"""The ranks that share one model.

Used by layers, which ask a mesh for their share of a weight and to combine partial results.
"""
