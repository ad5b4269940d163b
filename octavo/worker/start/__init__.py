"""The start of a rank: models are opened and loaded, and memory is planned and measured.

`opening`, `loading` and `sizing` are where to begin. Used by the worker, and by `octavo explain` without weights.
"""
