"""The tokenizer: text to ids and back, conversations to ids, and the files that other programs read."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from modicum.store import hash_json, write_json, write_text
from modicum.tokenizer.chat import Rendered, Renderer
from modicum.tokenizer.definition import json_text
from modicum.tokenizer.encoder import PlainEncoder
from modicum.tokenizer.special import EOT, IM_END, IM_START, PAD
from modicum.tokenizer.template import Template
from modicum.tokenizer.vocabulary import is_byte_level, is_control, token_bytes


class Tokenizer:
    """A tokenizer and its chat template. `train_tokenizer` and `load_tokenizer` make one.

    vocab_size: a multiple of 64; every id below it has a token. eot_id stands before every document and is the target
    that ends it; pad_id is another id. special_ids: every control token; `encode` never returns one, `render` does
    where the template wrote it. hash: SHA-256 over everything that decides an id, and the template.
    """

    vocab_size: int
    eot_id: int
    pad_id: int
    im_start_id: int
    im_end_id: int
    special_ids: frozenset[int]
    chat_template: str
    hash: str

    def __init__(self, definition: Mapping[str, Any], template: str) -> None:
        """definition: the content of a tokenizer.json that `load.checked_definition` accepts."""
        control = [entry for entry in definition["added_tokens"] if is_control(entry)]
        ids = {entry["content"]: entry["id"] for entry in control}
        self.special_ids = frozenset(ids.values())
        self.eot_id, self.pad_id, self.im_start_id, self.im_end_id = (ids[t] for t in (EOT, PAD, IM_START, IM_END))
        self._definition = definition
        self._plain = PlainEncoder(definition)
        self._byte_level = is_byte_level(definition)
        self._bytes = token_bytes(definition)
        self.vocab_size = len(self._bytes)
        self.chat_template = template
        self.hash = hash_json({"tokenizer": definition, "template": template})
        self._renderer = Renderer(Template(template), control, self.encode)

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone: nothing is put before or after it, and no control token comes out of it.

        Raises UserError for a lone surrogate.
        """
        return self._plain.encode_batch([text])[0]

    def encode_with_control(self, text: str) -> list[int]:
        """The ids of a text of our own making, in which the names of control tokens are meant as such."""
        return self._renderer.encode_with_control(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, on all cores. Raises UserError for a lone surrogate, naming the text's place."""
        return self._plain.encode_batch(texts)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; bytes that make no whole character become U+FFFD. Raises ValueError for an unknown id."""
        kept = [i for i in map(int, ids) if not (skip_special and i in self.special_ids)]
        pieces = [self.id_bytes(i) for i in kept]
        if self._byte_level:
            return b"".join(pieces).decode("utf-8", "replace")
        return str(self._whole.decode(kept, skip_special_tokens=False))

    def id_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, perhaps a part of a character. Raises ValueError for an unknown id."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._bytes[token_id]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Rendered:
        """The ids of a conversation, for training and for serving alike; the rules stand in `chat`.

        messages: role (system, user, assistant or tool) and content, as the OpenAI API has them; tool_calls on
        assistant ones. tools: JSON schemas. A template that tells the date (strftime_now) gives other ids tomorrow.
        Raises UserError for a conversation or a template that cannot be rendered faithfully.
        """
        return self._renderer.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    def save(self, directory: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja: what transformers' AutoTokenizer reads.

        The same tokenizer gives the same bytes. Exporters to GGUF name its pre-tokenizer "qwen2" when it was trained
        here.
        """
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / "tokenizer.json", json_text(self._definition))
        write_text(directory / "chat_template.jinja", self.chat_template)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": EOT,
            "pad_token": PAD,
            "unk_token": None,
            "add_bos_token": False,
            "add_eos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
        }
        write_json(directory / "tokenizer_config.json", settings)

    @cached_property
    def _whole(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(json_text(self._definition))
