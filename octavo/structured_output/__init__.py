"""Text of a given form: grammars of requests, and the tokens that each of them admits next.

The front checks a grammar, the workers compile it and keep its state. llguidance is imported when the
first request needs it.
"""
