"""Transfers of KV blocks from and to other engines, host memory and disks, on the scheduler's side. It names blocks by
their digests; `worker/transfer` moves the bytes. The scheduler uses the protocol of a connector; the engine makes one
where the configuration asks for it.
"""
