"""Tests of octavo/config: arguments, their sources, resolution, and what is told about them."""
