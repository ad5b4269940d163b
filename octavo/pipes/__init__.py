"""Sends tensors between processes and machines, and buffers KV that is looked up by tokens.

Used by worker/transfer, which sends KV blocks to the ranks of other engines.
"""
