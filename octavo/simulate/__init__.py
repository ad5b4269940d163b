"""The real scheduler and block manager in simulated time: cost models, traces, replicas, routers, reports, replay.

The command line and benchmarks use it.
"""
