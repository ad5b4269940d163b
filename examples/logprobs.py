"""Print the drawn token at each position beside the likeliest ones. `python examples/logprobs.py`"""

from octavo import LLM, SamplingParams


def main() -> None:
    with LLM() as llm:
        [output] = llm.generate("The king said", SamplingParams(temperature=0.7, max_tokens=8, logprobs=3, seed=3))
        completion = output.outputs[0]
        for token_id, candidates in zip(completion.token_ids, completion.logprobs or [], strict=True):
            drawn = candidates[token_id]
            likeliest = sorted(candidates.values(), key=lambda each: each.rank or 0)
            row = "  ".join(f"{each.decoded_token!r} {each.logprob:.2f}" for each in likeliest)
            print(f"{drawn.decoded_token!r:>12} (rank {drawn.rank})   {row}")


if __name__ == "__main__":
    main()
