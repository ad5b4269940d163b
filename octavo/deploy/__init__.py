"""Runs octavo on serving platforms of others.

Each file needs the extra of its platform. Used by the platforms, which import it.
"""
