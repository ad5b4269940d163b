"""Tests of octavo.devices; what kernels compute is tested in tests/conformance."""
