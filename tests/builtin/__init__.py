"""Tests of octavo/builtin: the text generator, the tokenizer, training in small, and the shipped model's files."""
