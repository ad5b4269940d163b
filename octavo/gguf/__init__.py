"""GGUF, llama.cpp's file of a whole model: its header, and its config, names of tensors and tokenizer in the layout of
Hugging Face. `quantization/gguf.py` decodes the weights.

May import config.section. Used by config, engine and models.
"""
