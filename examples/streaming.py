"""Stream several requests from one engine at the same time. `python examples/streaming.py`"""

import asyncio

from octavo import AsyncLLM, EngineArgs, OutputKind, SamplingParams

PROMPTS = ["Once upon a time", "One morning", "Far away"]


async def read(llm: AsyncLLM, number: int, prompt: str) -> None:
    params = SamplingParams(max_tokens=32, seed=number, output_kind=OutputKind.DELTA)
    async for output in llm.generate(prompt, params):
        for part in output.outputs:
            print(f"{number}: {part.text!r}")


async def main() -> None:
    llm = await AsyncLLM.start(EngineArgs())  # the engine's core runs in a process of its own
    try:
        await asyncio.gather(*(read(llm, number, prompt) for number, prompt in enumerate(PROMPTS)))
    finally:
        await llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
