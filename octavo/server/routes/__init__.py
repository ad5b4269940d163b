"""The handlers of endpoints, one file per family, with the structs that nothing else uses; endpoints.py lists them.
Each handler is `handler(context, request)`. A file may import server's schema, sending and errors, and no
other file of this folder. Used by server/endpoints.py alone."""
