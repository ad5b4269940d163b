"""KV blocks from elsewhere and for elsewhere, on the side of the scheduler: other engines, the host, a disk.

It names blocks by their digests and moves no bytes: that does `worker/transfer`. The scheduler uses the
protocol of a connector; the engine makes one where the configuration asks for it.
"""
