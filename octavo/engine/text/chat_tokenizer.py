"""What `LLM.get_tokenizer` returns: a model's tokenizer and chat template, with the methods that programs know from
transformers' tokenizers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.core.prompt import Prompt
from octavo.engine.text.chat_template import ChatOptions, Message
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import InvalidRequest


class ChatTokenizer:
    """A tokenizer whose methods and defaults are those of transformers' tokenizers. It encodes as the engine does."""

    def __init__(self, tokenizer: Tokenizer, render: Callable[[Sequence[Message], ChatOptions], Prompt]) -> None:
        """render: makes a prompt of a conversation."""
        self._tokenizer = tokenizer
        self._render = render
        texts = tokenizer.special_tokens
        self.bos_token, self.eos_token = tokenizer.bos_token, tokenizer.eos_token
        self.pad_token, self.unk_token = texts.get("pad_token"), texts.get("unk_token")
        self.bos_token_id, self.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.pad_token_id, self.unk_token_id = map(tokenizer.token_id, (self.pad_token, self.unk_token))
        self.all_special_ids = sorted(tokenizer.special_ids)
        self.all_special_tokens = [tokenizer.added_tokens[token_id] for token_id in self.all_special_ids]

    def __len__(self) -> int:
        return len(self._tokenizer)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included."""
        return self._tokenizer.vocab_size

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Return the token ids of a text, or of several, under the key input_ids."""
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens)}
        return {"input_ids": [self.encode(each, add_special_tokens) for each in text]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises InvalidRequest for text that no UTF-8 stands for."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any:
        """Return the text of token ids, or of one; of several sequences of token ids, a list of texts.

        token_ids: integers or sequences of them, also of numpy or torch. Raises TypeError for anything else.
        """
        given = _as_integers(token_ids)
        if isinstance(given, list) and given and isinstance(given[0], list):
            return [self.decode(each, skip_special_tokens) for each in given]
        return self._tokenizer.decode([given] if isinstance(given, int) else given, skip_special_tokens)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each sequence of token ids, given as in `decode`."""
        return [self.decode(each, skip_special_tokens) for each in _as_integers(sequences)]

    def token_id(self, token: str | None) -> int | None:
        """Return the id of one token given by its text in the vocabulary, None when it has none."""
        return self._tokenizer.token_id(token)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or of each of several; that of the unknown token for texts that are none."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(each) for each in tokens]
        found = self.token_id(tokens)
        return self.unk_token_id if found is None else found

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Return the text in the vocabulary of a token id, or of each of several; None for ids without a token.

        ids: an integer or a sequence of them, also of numpy or torch.
        """
        given = _as_integers(ids)
        return self._tokenizer.word(given) if isinstance(given, int) else [self._tokenizer.word(each) for each in given]

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **template_values: Any,
    ) -> Any:
        """Return what a conversation becomes, or each of several: token ids, or text where `tokenize` is False.

        return_dict: the token ids stand under the key input_ids. template_values: further values that the template may
        use, such as `enable_thinking`. Other arguments are fields of `ChatOptions`; as in the engine, a special token
        that a message spells is text, but who gives such a text to the engine again gives it the token. Raises
        InvalidRequest.
        """
        options = ChatOptions(
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=template_values,
        )
        is_single = not conversation or isinstance(conversation[0], Mapping)
        conversations: Any = [conversation] if is_single else conversation
        made: list[Any] = [self._render(each, options) for each in conversations]
        if any(each.text is None for each in made):
            raise InvalidRequest("messages with vectors have no text; give them to LLM.chat", field="messages")
        if tokenize:
            made = [self._tokenizer.encode(each.text, each.add_special_tokens, each.cuts) for each in made]
        else:
            made = [each.text for each in made]
        found = made[0] if is_single else made
        return {"input_ids": found} if tokenize and return_dict else found


def _as_integers(value: Any) -> Any:
    """Return integers, and lists of them, in place of those of numpy and torch. Raises TypeError for anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_as_integers(each) for each in value]
    return operator.index(value)
