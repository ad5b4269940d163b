"""The endpoints, one file per family; each has `routes(context)`, which app.py collects.
May import server's schema, responses, streaming and errors; a route never imports another.
Used by server/app.py alone."""
