"""Tensors between processes and machines, and a buffer of KV that is looked up by tokens.

Used by worker/transfer, which sends KV blocks to the ranks of other engines.
"""
