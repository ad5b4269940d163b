"""How a step reaches the workers: one worker is its own executor; several ranks have processes of their own.

Imports worker lazily (it brings torch). The engine core talks to the `Executor` protocol only.
"""
