"""octavo inside the platforms of others. Each file needs the extra of its platform.

May import: core, config, server, async_llm. Used by the platforms.
"""
