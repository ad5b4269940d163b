"""Scripts that run the real clients of others against a server."""
