"""Tests of octavo.sampling.processors."""
