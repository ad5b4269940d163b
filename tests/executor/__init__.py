"""Tests of octavo.executor."""
