"""Measurements of the device cuda."""
