"""The engine around the scheduler: text in, text out, and the core's loop in this process or in one of its own.

Used by llm, async_llm and server. docs/design/front.md says what each file is. A request passes tokenizer and
chat_template, input_processor, engine_core, and output_processor with its open_request and detokenizer. With several
processes replicas and core_client are between these, and core_process runs the core.
"""
