"""The real scheduler and block manager in simulated time: cost models, traces, replicas, routers, reports, replay.

Imports engine, scheduler, kv_cache, config and core; no torch. The command line and benchmarks use it.
"""
