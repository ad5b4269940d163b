"""Ask questions through the model's chat template. `python examples/chat.py`"""

from octavo import LLM, SamplingParams

QUESTIONS = ["Who are you?", "What is octavo?", "Tell me a story about a fox."]


def main() -> None:
    with LLM() as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        params = SamplingParams(temperature=0, max_tokens=96)
        for question, output in zip(QUESTIONS, llm.chat(conversations, params), strict=True):
            print(f"> {question}\n{output.outputs[0].text.strip()}\n")


if __name__ == "__main__":
    main()
