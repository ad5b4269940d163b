"""Tests of the HTTP server, over real sockets: most with a fake engine that spells its answers out.
May import octavo.server, the openai client and tests/server's own fake.
Run by pytest."""
