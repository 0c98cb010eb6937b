"""The tokenizer: text to ids and back, conversations to ids, and the files that other programs read."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from modicum.store import UserError, hash_json, write_json, write_text
from modicum.tokenizer.chat import Rendered, Renderer
from modicum.tokenizer.definition import json_text
from modicum.tokenizer.encoder import PlainEncoder
from modicum.tokenizer.roles import OWN_ROLES, Roles, post_processor_of
from modicum.tokenizer.special import IM_END, NEEDED_TOKENS, TOOL_MARKERS
from modicum.tokenizer.template import Template
from modicum.tokenizer.vocabulary import is_byte_level, is_control, token_bytes


class Tokenizer:
    """A tokenizer and its chat template. `train_tokenizer` and `load_tokenizer` make one.

    vocab_size: one more than the highest id; a multiple of 64, each with a token, unless the tokenizer was kept as it
    came. bos_id stands before every text and eot_id ends it (one token does both in our own, `<|endoftext|>`, and in
    those that put nothing before a text); pad_id fills places that are masked; roles: their names. special_ids: every
    control token; `encode` never returns one, `render` does where the template wrote it. spoken_ids: those of them that
    a model may write into an answer, and that are text of it: the marks of a tool call, and what the tokenizer does not
    flag as special (Qwen3's `<think>`), as transformers decodes it. chat_template: None where there is none.
    definition: the content of tokenizer.json but for its post-processor. hash: SHA-256 over all that decides the ids of
    a text, so the template is not in it.
    """

    vocab_size: int
    bos_id: int
    eot_id: int
    pad_id: int
    special_ids: frozenset[int]
    spoken_ids: frozenset[int]
    chat_template: str | None
    roles: Roles
    definition: Mapping[str, Any]
    hash: str

    def __init__(self, definition: Mapping[str, Any], template: str | None, roles: Roles = OWN_ROLES) -> None:
        """definition: the content of a tokenizer.json that `checked_definition` accepts, and `with_roles` for others'
        roles."""
        control = [entry for entry in definition["added_tokens"] if is_control(entry)]
        self._ids: dict[str, int] = {entry["content"]: entry["id"] for entry in control}
        self.special_ids = frozenset(self._ids.values())
        steering = {*NEEDED_TOKENS, *roles.named.values(), roles.before} - {*TOOL_MARKERS}
        self.spoken_ids = frozenset(
            entry["id"]
            for entry in control
            if entry["content"] not in steering and (entry["content"] in TOOL_MARKERS or not entry["special"])
        )
        self.bos_id, self.eot_id, self.pad_id = (self._ids[t] for t in (roles.before, roles.eos, roles.pad))
        self.definition = definition
        self.roles = roles
        self._plain = PlainEncoder(definition)
        self._bytes = token_bytes(definition)
        self.vocab_size = len(self._bytes)
        self.chat_template = template
        hashed = {"tokenizer": definition}
        parts = {"bos": roles.before, "eos": roles.eos, "pad": roles.pad}
        self._own = parts == {"bos": OWN_ROLES.before, "eos": OWN_ROLES.eos, "pad": OWN_ROLES.pad}
        self.hash = hash_json(hashed if self._own else {**hashed, "roles": parts})
        compiled = None if template is None else Template(template)
        self._renderer = Renderer(compiled, control, self.encode, roles.named)
        # SentencePiece writes a space before every text, which is no part of it
        said = b"".join(map(self.id_bytes, self.encode("x")))
        self._prefixed = not is_byte_level(definition) and said.startswith(b" ")

    @cached_property
    def end_of_turn_id(self) -> int:
        """What the template writes after an answer, where that is a control token (in ChatML `<|im_end|>`); else
        eot_id."""
        usual = self._ids[IM_END] if self._own and self._ids.keys() >= set(NEEDED_TOKENS) else self.eot_id
        if self.chat_template is None:
            return usual
        try:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            rendered = self.render(turns)
        except UserError:  # it may want another conversation than this one; who renders with it is told why
            return usual
        last = [token for token, supervised in zip(rendered.ids, rendered.assistant_mask, strict=True) if supervised][
            -1:
        ]
        return last[0] if last and last[0] in self.special_ids else self.eot_id

    def with_template(self, template: str | None) -> "Tokenizer":
        """The same tokenizer with another chat template, or with none."""
        return self if template == self.chat_template else Tokenizer(self.definition, template, self.roles)

    def at(self, moment: float) -> "Tokenizer":
        """The same tokenizer, for whose template it is always this moment, in seconds since the epoch."""
        fixed = copy(self)
        fixed._renderer = self._renderer.at(moment)
        return fixed

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
        pieces, before = [], None
        for token in map(int, ids):
            if not (skip_special and token in self.special_ids):
                pieces.append(self.bytes_after(token, before))
            before = token
        return b"".join(pieces).decode("utf-8", "replace")

    def id_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, perhaps a part of a character. Raises ValueError for an unknown id."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._bytes[token_id]

    def bytes_after(self, token_id: int, before: int | None) -> bytes:
        """The bytes that a token adds to a text whose last token is `before` (None: there is none yet).

        Those of `id_bytes`, but for the space that a SentencePiece tokenizer puts before every text.
        """
        found = self.id_bytes(token_id)
        starts = self._prefixed and (before is None or before in self.special_ids)
        return found[1:] if starts and found.startswith(b" ") and token_id not in self.special_ids else found

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        masked: bool = True,
    ) -> Rendered:
        """The ids of a conversation, for training and for serving alike; the rules stand in `chat`.

        messages: role (system, user, assistant or tool) and content, as the OpenAI API has them; tool_calls on
        assistant ones. tools: JSON schemas. masked: whether assistant_mask is wanted, and what it is checked for; a
        long conversation pays for both. A template that tells the date (strftime_now) gives other ids tomorrow.
        Raises UserError for a conversation or a template that cannot be rendered faithfully.
        """
        return self._renderer.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, masked=masked)

    def save(self, directory: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, where there is a template, chat_template.jinja: what
        transformers' AutoTokenizer reads. There it puts around a text what the tokenizer did where it came from.

        The same tokenizer gives the same bytes. Exporters to GGUF name its pre-tokenizer "qwen2" when it was trained
        here.
        """
        directory.mkdir(parents=True, exist_ok=True)
        around = post_processor_of(self.roles, self._ids)
        write_text(directory / "tokenizer.json", json_text({**self.definition, "post_processor": around}))
        template = directory / "chat_template.jinja"
        if self.chat_template is None:
            template.unlink(missing_ok=True)
        else:
            write_text(template, self.chat_template)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.roles.bos,
            "eos_token": self.roles.eos,
            "pad_token": self.roles.pad,
            "unk_token": self.roles.unk,
            **self._said_around(),
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
        }
        write_json(directory / "tokenizer_config.json", settings)

    def _said_around(self) -> dict[str, bool]:
        """What stands around a text, in the words of tokenizer_config.json: where those are there, transformers makes a
        post-processor of them in the place of tokenizer.json's. They know bos and eos alone."""
        opens, closes = self.roles.opens, self.roles.closes
        if opens not in (None, self.roles.bos) or closes not in (None, self.roles.eos):
            return {}
        return {"add_bos_token": opens is not None, "add_eos_token": closes is not None}
