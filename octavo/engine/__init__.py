"""The engine around the scheduler: text in, text out, and the core's loop in this process or in one of its own.

Used by llm, async_llm and server.
Front: tokenizer, chat_template, fill_in, input_processor, output_processor, open_request, detokenizer.
Core: engine_core, core_process.
"""
