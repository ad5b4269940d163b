"""What a caller gives becomes a request that a core accepts, or is refused with the field, the value and the limit.

`input_processor` is where to begin; the other files are about prompts that become vectors or scores. Used by the
engines and by the server's processes for text.
"""
