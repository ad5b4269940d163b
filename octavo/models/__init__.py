"""Architectures, one short file each, and what finds, builds and fills them.

May import layers, attention, distributed, ops, config.checkpoint and core; a model imports no other model.
Used by the worker.
"""
