"""The whole engine in one process on tiny checkpoints. Uses the public API; transformers is the oracle."""
