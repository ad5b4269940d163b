"""Draw several continuations of one prompt, which is computed once. `python examples/parallel_sampling.py`"""

from octavo import LLM, SamplingParams


def main() -> None:
    with LLM() as llm:
        [output] = llm.generate(
            "Once upon a time", SamplingParams(n=4, temperature=1.0, max_tokens=24, seed=7, logprobs=0)
        )
        for completion in output.outputs:
            print(f"[{completion.index}] {completion.cumulative_logprob:8.2f}  {output.prompt}{completion.text}")


if __name__ == "__main__":
    main()
