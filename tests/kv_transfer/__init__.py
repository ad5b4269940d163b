"""KV transfers on the side of the scheduler."""
