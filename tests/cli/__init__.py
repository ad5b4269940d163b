"""Tests of octavo/cli. Nothing here loads a model unless a test says so."""
