"""The ranks' half of KV transfers: blocks of this rank as bytes, to and from the ranks of other engines and from tiers.

The commands come with steps, the notes go back at any time (`kv_transfer/messages.py`). Nothing here runs in an engine
without a connector.
"""
