"""Which control tokens stand before a text, after it, and in empty places: our own, or those of another tokenizer.

Those of others stand in the tokenizer_config.json beside their tokenizer.json; which of them its users get around a
text without asking says the post-processor in it, and nothing else does.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from modicum.store import UserError
from modicum.tokenizer.definition import checked_definition
from modicum.tokenizer.encoder import guarded
from modicum.tokenizer.special import EOT, PAD, special_entry
from modicum.tokenizer.vocabulary import is_control


@dataclass(frozen=True)
class Roles:
    """Names of control tokens. eos ends a text; pad fills places that are masked, so it may be any token; bos is what
    templates call by that name; unk is never written: every text can be said. opens and closes are what the tokenizer
    puts before and after a text by itself, for whoever does not ask it to leave them out.
    """

    eos: str
    pad: str
    bos: str | None = None
    unk: str | None = None
    opens: str | None = None
    closes: str | None = None

    @property
    def before(self) -> str:
        """What stands before a text. Not every bos does: some models name one that only their chats are made with."""
        return self.opens or self.eos

    @property
    def named(self) -> dict[str, str]:
        """The roles that are filled, under the names that templates and tokenizer_config.json have for them."""
        every = {"bos_token": self.bos, "eos_token": self.eos, "pad_token": self.pad, "unk_token": self.unk}
        return {name: token for name, token in every.items() if token is not None}


OWN_ROLES = Roles(eos=EOT, pad=PAD)


def with_roles(
    definition: dict[str, Any], settings: Any, origin: str, *, post_processor: Any = None
) -> tuple[dict[str, Any], Roles]:
    """The definition with the tokens of the roles as control tokens, and the roles.

    settings: the content of a tokenizer_config.json; without an eos_token there, `<|endoftext|>` where it is a control
    token. post_processor: that of the tokenizer.json. Raises UserError, with `origin` in front, for a role whose token
    is not in the vocabulary, for two tokens of which one is made by merging text, where nothing could end a text, and
    where more than one token is put before or after it.
    """
    given = given_roles(settings if isinstance(settings, dict) else {}, origin)
    vocab = definition["model"]["vocab"]
    strange = [f"{role} {token!r}" for role, token in given.items() if token not in vocab]
    if strange:
        raise UserError(f"{origin}: its tokenizer_config.json names {', '.join(strange)}, which it has no id for")
    opens, closes = _around(post_processor, vocab, origin)
    added = {entry["content"]: entry for entry in definition["added_tokens"]}
    for token in (*given.values(), *filter(None, (opens, closes))):
        added[token] = {**added.get(token, special_entry(token, vocab[token])), "special": True}
    entries = sorted(added.values(), key=lambda entry: entry["id"])
    control = [entry["content"] for entry in entries if is_control(entry)]
    eos = given.get("eos_token") or (EOT if EOT in control else None)
    if eos is None:
        raise UserError(
            f"{origin}: nothing says which token ends a text; name it as eos_token in a tokenizer_config.json beside it"
        )
    bos, unk = given.get("bos_token"), given.get("unk_token")
    pad = given.get("pad_token") or _padding(control, {eos, bos, opens}, unk) or eos
    roles = Roles(eos, pad, bos, unk, opens, closes)
    return checked_definition({**definition, "added_tokens": entries}, origin), roles


def post_processor_of(roles: Roles, ids: Mapping[str, int]) -> dict[str, Any] | None:
    """The post-processor of a tokenizer.json that puts a role's tokens around every text; None where there are none."""
    if roles.opens is None and roles.closes is None:
        return None

    def framed(letter: str, number: int) -> list[dict[str, Any]]:
        parts = [roles.opens and ("SpecialToken", roles.opens), ("Sequence", letter)]
        parts.append(roles.closes and ("SpecialToken", roles.closes))
        return [{part[0]: {"id": part[1], "type_id": number}} for part in parts if part]

    tokens = [token for token in (roles.opens, roles.closes) if token is not None]
    return {
        "type": "TemplateProcessing",
        "single": framed("A", 0),
        "pair": [*framed("A", 0), *framed("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in tokens},
    }


def _around(post_processor: Any, vocab: Mapping[str, int], origin: str) -> tuple[str | None, str | None]:
    """What a post-processor puts before and after a text: asked of the library, with a vocabulary of one word."""
    if post_processor is None:
        return None, None
    word = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    content = {"version": "1.0", "added_tokens": [], "post_processor": post_processor, "model": word}
    encoding = guarded(
        lambda: tokenizers.Tokenizer.from_str(json.dumps(content)).encode("a"), f"{origin}: its post_processor"
    )
    text = [place for place, special in enumerate(encoding.special_tokens_mask) if not special]
    before, after = encoding.ids[: text[0]] if text else [], encoding.ids[text[-1] + 1 :] if text else []
    if len(text) != 1 or len(before) > 1 or len(after) > 1:
        raise UserError(
            f"{origin}: its post_processor makes {len(encoding.ids)} tokens of a text of one; before and after a text "
            "one token each can stand here"
        )
    names = {number: token for token, number in vocab.items()}
    strange = [number for number in (*before, *after) if number not in names]
    if strange:
        raise UserError(f"{origin}: its post_processor adds the id {strange[0]}, which no token has")
    return (names[before[0]] if before else None), (names[after[0]] if after else None)


def given_roles(settings: Mapping[str, Any], origin: str) -> dict[str, str]:
    """The roles that tokenizer_config.json fills, with a token's name or with an object that holds it as content.

    Raises UserError, with `origin` in front, for what is neither.
    """
    found = {}
    for role in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(role)
        token = value.get("content") if isinstance(value, dict) else value
        if token is not None and not isinstance(token, str):
            raise UserError(f"{origin}: tokenizer_config.json, {role}: expected a token, found {value!r}")
        if token:
            found[role] = token
    return found


def _padding(control: Iterable[str], taken: set[str | None], unk: str | None) -> str | None:
    """A token for padding where none is named: one that no text is made of and that ends or begins nothing."""
    free = [token for token in control if token not in taken]
    if unk in free:
        return unk
    for part in ("pad", "reserved"):
        found = next((token for token in free if part in token.lower()), None)
        if found is not None:
            return found
    return None
