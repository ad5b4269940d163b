"""Tests of octavo.ops."""
