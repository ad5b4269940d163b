"""The responses of the server by API: the objects of the OpenAI API, with vLLM's extensions on request.

A field that is UNSET is left out; a field that is None is `null`, as in the OpenAI API.
"""
