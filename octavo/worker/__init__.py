"""The device plane of one rank: the model, its KV cache, the states of its sequences, and the step that uses them.

Used by executor, and by the command line to explain a model. A start: worker and `start` (opening, sizing, loading). A
step: model_runner (cache_engine), `batch` (sequence_state, input_batch), the model, drawing; on a GPU launching and
whole_steps. Guesses of a second model: `drafting`.
docs/design/worker.md says why.
"""
