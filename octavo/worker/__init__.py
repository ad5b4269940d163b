"""The device plane of one rank: the model, its KV cache, the states of its sequences, and the step that uses them.

Used by executor, and by the command line to explain a model. A start: worker, opening, sizing (memory, activations,
cache_plan, warm_up), loading. A step: model_runner (sequence_state, cache_engine), input_batch, the model, drawing; on
a GPU launching and whole_steps. Guesses of a second model: draft_model, drafter, block_drafter, state_drafter.
docs/design/worker.md says why.
"""
