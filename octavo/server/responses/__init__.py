"""Structs of responses that several files use; the others stand beside their handlers in routes/.

A field that is UNSET is left out; a field that is None is `null`, as in the OpenAI API.
"""
