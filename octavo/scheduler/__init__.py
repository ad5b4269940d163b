"""What runs in the next step: admission control, queues, budgets, admission, preemption, forks, ends of sequences.

No torch, and no clock of its own: `now` is an argument.
"""
