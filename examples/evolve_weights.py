"""Change a model while it runs: keep random changes of its weights that make it write more of a letter.

`python examples/evolve_weights.py`
"""

import torch
from safetensors.torch import load_file

from octavo import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The fox", "One day a girl", "In the forest"]
PARAMS = SamplingParams(temperature=0, max_tokens=32)
ROUNDS = 3


def changed(weights: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    noise = {name: torch.randn(each.shape, generator=generator) for name, each in weights.items()}
    return {name: each + 0.04 * each.std() * noise[name].to(each.dtype) for name, each in weights.items()}


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    with LLM("octavo-tiny", enable_sleep_mode=True) as llm:

        def reward() -> float:
            texts = "".join(output.outputs[0].text for output in llm.generate(PROMPTS, PARAMS))
            return texts.count("s") / len(texts)

        weights = load_file(f"{llm.config.model.path}/model.safetensors")
        best = first = reward()
        for number in range(1, ROUNDS + 1):
            candidate = changed(weights, generator)
            llm.update_weights_from_tensor(candidate.items())
            found = reward()
            print(f"round {number}: {found:.1%} of the letters are s, at most {best:.1%} before")
            if found > best:
                best, weights = found, candidate
        print(f"from {first:.1%} to {best:.1%}")


if __name__ == "__main__":
    main()
