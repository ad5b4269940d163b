"""Which sequence has which KV blocks: pools with reference counts, prefix index and eviction; block tables.

Pure accounting without tensors. docs/design/kv_cache.md says what each file is; block_manager.py has the interface.
"""
