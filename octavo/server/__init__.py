"""The HTTP server: the APIs of OpenAI and Anthropic over AsyncLLM, on Starlette and uvicorn; routes in routes/.

Used by `octavo serve`, and by programs that mount `octavo.server.app.build_app` in a server of their own."""
