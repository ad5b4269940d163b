"""Tests of octavo.layers."""
