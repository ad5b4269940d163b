"""What runs in the next step: admission control, queues, budgets, admission, preemption, forks, ends of sequences.

Imports core and kv_cache; no torch, no clock of its own (`now` is an argument). The engine core is its one user.
"""
