"""The HTTP server: the OpenAI API over AsyncLLM, on Starlette and uvicorn; one file per family of endpoints in routes/.
May import async_llm, engine's public names, config, core, errors and logging; never torch, scheduler or kv_cache.
Used by `octavo serve`, and by programs that mount `octavo.server.app.build_app` in a server of their own."""
