"""Files of vocabularies in the place of a tokenizer.json, converted to its layout.

`ranked_tokens` is where to begin. Used by the tokenizers of the engine and of forms, and by GGUF files.
"""
