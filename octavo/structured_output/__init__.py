"""Text of a given form: grammars of requests, and the tokens that each of them admits next.

The front checks a grammar, the workers compile it and keep its state. May import core and sampling. llguidance is
imported when the first request needs it.
"""
