"""Which control tokens stand before a text, after it, and in empty places: our own, or those of another tokenizer.

Those of others stand in the tokenizer_config.json beside their tokenizer.json.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from modicum.store import UserError
from modicum.tokenizer.definition import checked_definition
from modicum.tokenizer.special import EOT, PAD, special_entry
from modicum.tokenizer.vocabulary import is_control


@dataclass(frozen=True)
class Roles:
    """Names of control tokens. eos ends a text; bos stands before one, and where it is None eos does that too; pad
    fills places that are masked, so it may be any token. unk is never written: every text can be said.
    """

    eos: str
    pad: str
    bos: str | None = None
    unk: str | None = None

    @property
    def before(self) -> str:
        """What stands before a text."""
        return self.bos or self.eos

    @property
    def named(self) -> dict[str, str]:
        """The roles that are filled, under the names that templates and tokenizer_config.json have for them."""
        every = {"bos_token": self.bos, "eos_token": self.eos, "pad_token": self.pad, "unk_token": self.unk}
        return {name: token for name, token in every.items() if token is not None}


OWN_ROLES = Roles(eos=EOT, pad=PAD)


def with_roles(definition: dict[str, Any], settings: Any, origin: str) -> tuple[dict[str, Any], Roles]:
    """The definition with the tokens of the roles as control tokens, and the roles.

    settings: the content of a tokenizer_config.json; without an eos_token there, `<|endoftext|>` where it is a control
    token. Raises UserError, with `origin` in front, for a role whose token is not in the vocabulary, for two tokens of
    which one is made by merging text, and where nothing could end a text.
    """
    given = _given(settings if isinstance(settings, dict) else {}, origin)
    vocab = definition["model"]["vocab"]
    strange = [f"{role} {token!r}" for role, token in given.items() if token not in vocab]
    if strange:
        raise UserError(f"{origin}: its tokenizer_config.json names {', '.join(strange)}, which it has no id for")
    added = {entry["content"]: entry for entry in definition["added_tokens"]}
    for token in given.values():
        added[token] = {**added.get(token, special_entry(token, vocab[token])), "special": True}
    entries = sorted(added.values(), key=lambda entry: entry["id"])
    control = [entry["content"] for entry in entries if is_control(entry)]
    eos = given.get("eos_token") or (EOT if EOT in control else None)
    if eos is None:
        raise UserError(
            f"{origin}: nothing says which token ends a text; name it as eos_token in a tokenizer_config.json beside it"
        )
    bos, unk = given.get("bos_token"), given.get("unk_token")
    pad = given.get("pad_token") or _padding(control, {eos, bos}, unk) or eos
    return checked_definition({**definition, "added_tokens": entries}, origin), Roles(eos, pad, bos, unk)


def _given(settings: Mapping[str, Any], origin: str) -> dict[str, str]:
    """The roles that tokenizer_config.json fills, with a token's name or with an object that holds it as content."""
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
