"""Tests of octavo.worker."""
