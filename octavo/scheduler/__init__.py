"""What runs in the next step: admission control, queues, budgets, admission, preemption, forks, ends of sequences.

No torch, and no clock of its own: `now` is an argument. docs/design/scheduler.md says what each file is; to read on,
begin with scheduler.py, continuous.py and rows.py.
"""
