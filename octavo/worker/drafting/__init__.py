"""Guesses of next tokens by a second model or by heads of the model itself.

`drafter` and `draft_model` are where to begin. Used by the runner and by the plan of memory.
"""
