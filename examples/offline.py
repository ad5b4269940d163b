"""Continue several prompts at once, in this process. `python examples/offline.py`"""

from octavo import LLM, SamplingParams

PROMPTS = ["Once upon a time", "In the garden there was", "The old fisherman"]


def main() -> None:
    # LLM("DIRECTORY or hub name"); without a model it takes the small one that ships with octavo
    with LLM() as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=48, seed=1)):
            print(f"{output.prompt}{output.outputs[0].text}\n")


if __name__ == "__main__":
    main()
