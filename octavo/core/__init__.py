"""The words that every room uses: sampling parameters, prompts, sequences, and the messages between the planes.

Imports nothing of octavo but `errors`; no torch. Everybody imports from here.
"""
