"""Attention over the paged KV cache: what a step says about its tokens, the backend protocol, the implementations.

Used by layers, through the bound backend, and by the worker, which makes the metadata.
"""
