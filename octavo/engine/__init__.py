"""The engine around the scheduler: text in, text out, and the core's loop in this process or in one of its own.

Used by llm, async_llm and server. docs/design/front.md says what each file is. A request passes `text` and `input`,
engine_core, and `output`. With several processes `cores` is between these: replicas and core_client in the front,
core_process around the core.
"""
