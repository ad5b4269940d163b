"""The words that every room uses: sampling parameters, prompts, sequences, and the messages between the planes.

Everybody imports from here.
"""
