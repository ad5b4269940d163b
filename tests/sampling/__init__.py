"""Tests of octavo.sampling."""
