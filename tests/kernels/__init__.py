"""Tests of octavo.kernels: what surrounds the kernels; what they compute is tested in tests/conformance."""
