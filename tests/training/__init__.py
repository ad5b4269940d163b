"""Tests of training/octavo_tiny: the text generator, the tokenizer, and training in small."""
