"""Tests of octavo/builtin: the files of the shipped model."""
