"""Tests of the page: its JavaScript with node, and the whole in a headless browser."""
