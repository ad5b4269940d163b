"""Speculative decoding: guesses of the next tokens, and how many of them a step verifies.

Free of torch. What is generated does not depend on anything in here, only how fast it comes.
"""
