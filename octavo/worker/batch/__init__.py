"""The flat tensors of a step, made from its rows, and what is kept of each sequence between steps.

`input_batch` is where to begin. Used by the runner, drafters and poolers.
"""
