"""What a person may set, where it comes from, and what follows from it: arguments in, one frozen EngineConfig out.
Only sources.py reads the environment.
Used by llm, async_llm, the server and the command line; every other room sees sections of schema.py only."""
