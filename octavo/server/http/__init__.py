"""Connections of HTTP, TLS and WebSockets, with their limits, deadlines and ends.

`http_protocol` and `connections` are where to begin. Nothing here knows of models. Used by `serving` and `realtime`.
"""
