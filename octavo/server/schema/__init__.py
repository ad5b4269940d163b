"""The bodies of requests by API, and responses that several modules use: each struct is the type, the validator and the
documentation of one body.

The structs list every field of the OpenAI API and of vLLM's extensions that is known. A field that is not supported is
annotated `Refused` with the reason, so that it is refused by name; a name that is not here at all is refused with the
nearest one that is. Limits of numbers are checked by SamplingParams alone, those of lists and texts come from
core/request_limits.py.

Of a response a field that is UNSET is left out; a field that is None is `null`, as in the OpenAI API.
"""
