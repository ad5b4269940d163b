"""How a step reaches the workers: in this process today, in others later.

Imports worker lazily (it brings torch). The engine core talks to the `Executor` protocol only.
"""
