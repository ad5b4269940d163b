"""Tests of octavo.models."""
