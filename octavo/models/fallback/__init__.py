"""Architectures without a file of octavo's own: classes of transformers over the paged KV cache, proved at start.

`library` finds the class, `recording` what its layers ask of attention and of torch, `swap` puts octavo's layers in its
place, `model` runs it, `shrink` and `proof` compare a small copy with transformers' own attention. transformers is an
optional package: nothing here is imported for the families that octavo has.
"""
