"""Tests of octavo.attention."""
