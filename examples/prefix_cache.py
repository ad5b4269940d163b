"""Pin a system prompt in the prefix cache, and print what that saves. `python examples/prefix_cache.py`"""

from octavo import LLM, SamplingParams

SYSTEM = {"role": "system", "content": "You are octavo, a friendly engine. Answer in one short sentence. " * 6}
QUESTIONS = ["What is octavo?", "What is a KV cache?", "Who are you?"]


def main() -> None:
    with LLM() as llm:
        pinned = llm.pin_prefix([SYSTEM], ttl_s=600)
        print(f"{pinned.num_tokens} tokens stay for ten minutes from when they are computed ({pinned.because})")
        for question in QUESTIONS:
            [output] = llm.chat([SYSTEM, {"role": "user", "content": question}], SamplingParams(max_tokens=24))
            found = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens were there"
            print(f"{found} ({output.cache_miss_reason}): {output.outputs[0].text!r}")
        llm.unpin_prefix([SYSTEM])


if __name__ == "__main__":
    main()
