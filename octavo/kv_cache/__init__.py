"""Which sequence has which KV blocks: pools with reference counts, prefix index and eviction; block tables.

Pure accounting without tensors.
"""
