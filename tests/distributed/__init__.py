"""Tests of octavo.distributed."""
