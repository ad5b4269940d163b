"""Tests of the endpoints, one file per family, mostly with the openai client.
May import octavo.server and the fixtures of tests/server.
Run by pytest."""
