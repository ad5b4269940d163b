"""The device plane of one rank: the model, its KV cache, the states of its sequences, and the step that uses them.

Used by executor, and by the command line to explain a model.
"""
