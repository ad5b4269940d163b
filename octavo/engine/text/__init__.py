"""Text to tokens and back: tokenizers, chat templates in their sandbox, prompts that are filled in, stop strings.

`tokenizer` and `chat_template` are where to begin. Used by the input and output of the engine, by the core for stop
strings of beams, and by the server. Nothing here knows of requests or scheduling.
"""
