"""Who owns which KV block: pool with reference counts, prefix index and eviction; block tables of all sequences.

Pure accounting: no tensors. Imports core only; the scheduler is its one user.
"""
