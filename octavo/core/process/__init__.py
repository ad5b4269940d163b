"""Processes and the connections between them: how they start, prove a secret, meet, and exchange frames.

`processes` and `frames` are where to begin. Used by cores, ranks, pipes, tiers and the server's helpers.
"""
