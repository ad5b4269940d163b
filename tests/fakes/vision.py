"""Small random checkpoints of models that read images, as transformers writes them, with tokenizer and settings."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from tests.fakes.checkpoints import rename_tensors
from tests.fakes.phi4 import merge_adapter, write_adapter
from tests.fakes.vision_families import FAMILIES
from tests.fakes.vision_sizes import SPECIALS


def image(seed: int, width: int = 84, height: int = 56) -> Any:
    """An image of Pillow with random pixels."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8))


_LIBRARY = {"DeepseekOCRForCausalLM": "UnlimitedOcrForConditionalGeneration"}
"""transformers' class by architecture, where it has another name."""


def _class(architecture: str) -> Any:
    import transformers

    from tests.fakes import dots_ocr, gemma3n

    own = getattr(dots_ocr, architecture, None) or vars(gemma3n).get(architecture)
    return own or getattr(transformers, _LIBRARY.get(architecture, architecture))


def make_vision_checkpoint(family: str, path: Path, seed: int = 0) -> Path:
    """Write a random model of a family to `path` and return it."""
    make, architecture = FAMILIES[family]
    return write_random(path, *make(), architecture, seed)


def fill_randomly(model: Any, seed: int = 0) -> None:
    """Give all parameters but single numbers random values."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.dim()):
            noise = torch.randn(parameter.shape, generator=generator)
            inputs = parameter.shape[-1] if parameter.shape[-1] > 1 else parameter[0].numel()  # of a convolution with 1
            parameter.copy_(noise * 0.2 + 1.0 if parameter.dim() == 1 else noise * 2.0 / inputs**0.5)


def write_random(path: Path, config: Any, processor: Any, architecture: str, seed: int = 0) -> Path:
    """Write a random model, the settings of its processor and a tokenizer to `path` and return it."""

    model = _class(architecture)(config)
    fill_randomly(model, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)
        processor.save_pretrained(path)
    # transformers 5.24 writes names of layers that no release has
    for name in ("blocks", "encoder.layers") if architecture.startswith(("Kimi", "Qianfan")) else ():
        rename_tensors(path, f"language_model.model.{name}", "language_model.model.layers")
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, "architectures": [architecture]}))
    write_tokenizer(path)
    if architecture.startswith("Phi4"):
        write_adapter(model, path)
    return path


def write_tokenizer(path: Path) -> None:
    """Words, one token each: the special tokens, and w0 to w99."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*SPECIALS, *(f"w{number}" for number in range(100)), "<|image|>"]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([*SPECIALS, "<|image|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def load_vision_oracle(path: Path, architecture: str, adapter: str = "vision-lora") -> Any:
    """The checkpoint as transformers reads it, in float32 with its plainest attention. adapter: of Phi-4-multimodal."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = _class(architecture)
        oracle = made.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    if architecture.startswith("Llama4"):
        # transformers 5.24 reads this of what its text model returns, which lacks it
        oracle.language_model.register_forward_hook(lambda *call: setattr(call[2], "image_outputs", None))
    if architecture.startswith("Phi4"):
        merge_adapter(oracle, path, adapter)
    if architecture.startswith("Mllama"):
        _hide_unseen(oracle)
    return oracle


def _hide_unseen(oracle: Any) -> None:
    """Let attention to images give nothing to tokens that see none, as in the released model: transformers gives them
    something of all images."""
    seen: list[Any] = []  # the mask of the layer that runs

    def note(module: Any, arguments: Any, given: Any) -> None:
        seen[:] = [given["full_text_row_masked_out_mask"][:, 0]]

    for layer in oracle.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            layer.register_forward_pre_hook(note, with_kwargs=True)
            layer.cross_attn.register_forward_hook(lambda module, arguments, out: (out[0] * seen[0], out[1]))
