"""The device plane of one rank: the model, its KV cache, the states of its sequences, and the step that uses them.

May import models, layers, lora, devices, attention, ops, sampling, structured_output, quantization, distributed, pipes,
config, messages and files of kv_transfer, and torch; never the scheduler. Used by executor, and by the command line to
explain a model.
"""
