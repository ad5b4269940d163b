"""The handlers of endpoints, one file per family; each is `handler(context, request)`, and endpoints.py lists them.
May import server's schema, responses, streaming and errors; a route never imports another.
Used by server/endpoints.py alone."""
