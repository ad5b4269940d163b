"""Tests of octavo.quantization."""
