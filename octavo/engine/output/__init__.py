"""What cores return becomes what callers read, text and log-probabilities, and is counted.

`output_processor` and `open_request` are where to begin. Used by the engines and, for metrics and readers, by the
server.
"""
