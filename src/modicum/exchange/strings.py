"""Strings on which two tokenizers must agree: adversarial ones, and random ones of assigned characters.

The characters are those of Unicode 3.2, which every Python has beside its own newer version: libraries learn new
characters at different times, and a letter that one of them does not know yet would be no fault of a file.
"""

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unicodedata import normalize, ucd_3_2_0

from tokenizers import Tokenizer as PlainTokenizer

from modicum.store import UserError
from modicum.tokenizer import Tokenizer, load_tokenizer
from modicum.tokenizer.load import template_in
from modicum.tokenizer.sentencepiece_model import ADVERSARIAL
from modicum.tokenizer.vocabulary import is_control

UNICODE = ucd_3_2_0.unidata_version
_FRAGMENTS = (
    "'s", "'S", "'t", "'re", "'VE", "'ll", "'ſ", "’s", " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n ", "\u00a0",
    "\u2003", "\u3000", "\u0085", "\u200b", "\u200d", "0", "7", "42", "1234567", "3.14", "²", "½", "٣", "a", "Z", "é",
    "e\u0301", "ß", "İ", "ǅ", "ﬁ", "日本", "한", "क्षि", "ไทย", "שָׁ", "🙂", "👩\u200d🚀", "🇩🇪", "!", "?!", "...", "--",
    "==", "(", ")", "_", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</s>", "the", " The", " of", "ing", "http://",
    "\x00", "\x1f",
)  # fmt: skip


def agreed_strings(tokenizer: Tokenizer, count: int, *, composed: bool = False) -> list[str]:
    """`count` strings, always the same for a tokenizer. composed: in NFC where it makes that of one, for those who do
    not, as llama.cpp."""
    strings = [*ADVERSARIAL, *_random(tokenizer, count)][:count]
    return [normalize("NFC", string) for string in strings] if composed and composes(tokenizer) else strings


def composes(tokenizer: Tokenizer) -> bool:
    """Whether it makes one character of a letter and its accent (NFC) before it cuts a text."""
    return tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def check_tokenizer(folder: Path, name: str, tokenizer: Tokenizer, strings: list[str]) -> None:
    """Raises UserError unless the tokenizers library gives, by the written tokenizer.json, the tokenizer's ids to
    `strings`, in which the names of control tokens are text; and unless the written files make the same tokenizer,
    with its template, its roles and what stands around a text."""
    _check_ids(folder, name, tokenizer, strings)
    try:
        found = load_tokenizer(folder, missing="keep")
    except UserError as error:
        told = str(error).replace(f"{folder}/", "")
        raise UserError(f"{name}: its tokenizer cannot be read back, and it was not written\n  {told}") from None
    faults = []
    if found.definition != tokenizer.definition:
        faults.append("tokenizer.json: is not the checkpoint's")
    if template_in(folder) != tokenizer.chat_template:
        faults.append("chat_template.jinja: is not the checkpoint's")
    if found.roles != tokenizer.roles:
        faults.append(
            "tokenizer_config.json, or the post_processor in tokenizer.json: tokens have other roles than in the "
            "checkpoint"
        )
    if faults:
        raise UserError("\n  ".join([f"{name}: read back, it is not the checkpoint, and was not written", *faults]))


def _check_ids(folder: Path, name: str, tokenizer: Tokenizer, strings: list[str]) -> None:
    definition = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    # The library keeps text from becoming a token only where that is flagged; our rule is wider, which is no fault.
    added = [{**entry, "special": is_control(entry)} for entry in definition["added_tokens"]]
    theirs = PlainTokenizer.from_str(json.dumps({**definition, "added_tokens": added}))
    theirs.encode_special_tokens = True
    found = [one.ids for one in theirs.encode_batch(strings, add_special_tokens=False)]
    differing = [
        (string, a, b) for string, a, b in zip(strings, found, tokenizer.encode_batch(strings), strict=True) if a != b
    ]
    if differing:
        string, there, here = differing[0]
        raise UserError(
            f"{name}: tokenizer.json gives other ids to {len(differing)} of {len(strings)} texts, so it was not "
            f"written. The first text: {string[:60]!r}, {there[:12]} there, {here[:12]} here"
        )


def _random(tokenizer: Tokenizer, count: int) -> Iterator[str]:
    """By turns: neighbouring characters, characters from anywhere, fragments, and the vocabulary's own tokens."""
    draw = random.Random(0)
    assigned = _assigned()
    plain = [number for number in range(tokenizer.vocab_size) if number not in tokenizer.special_ids]
    for number in range(count):
        length = draw.randint(1, 24)
        if number % 4 == 0:
            start = draw.randrange(len(assigned))
            near = [*assigned[start : start + 200], " ", "\n", "1", "'"]
            yield "".join(draw.choices(near, k=length))
        elif number % 4 == 1:
            yield "".join(draw.choices(assigned, k=length))
        elif number % 4 == 2:
            yield "".join(draw.choices(_FRAGMENTS, k=length))
        else:
            yield tokenizer.decode(draw.choices(plain, k=length))


@cache
def _assigned() -> list[str]:
    return [chr(c) for c in range(0x110000) if ucd_3_2_0.category(chr(c)) not in ("Cn", "Cs", "Co")]
