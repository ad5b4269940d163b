"""The HTTP server: the APIs of OpenAI and Anthropic over AsyncLLM, on Starlette and uvicorn; routes in routes/.
May import async_llm, engine's public names, config, core, errors and logging; never torch, scheduler or kv_cache.
Used by `octavo serve`, and by programs that mount `octavo.server.app.build_app` in a server of their own."""
