"""Texts on which two tokenizers must agree: adversarial ones, and random ones of assigned characters.

The characters are those of Unicode 3.2, which every Python has beside its own newer version: libraries learn new
characters at different times, and a letter that one of them does not know yet would be no fault of a file.
"""

import random
from collections.abc import Iterator
from functools import cache
from unicodedata import normalize, ucd_3_2_0

from modicum.tokenizer import Tokenizer
from modicum.tokenizer.sentencepiece_model import ADVERSARIAL

UNICODE = ucd_3_2_0.unidata_version
COUNT = 10_000
_FRAGMENTS = (
    "'s", "'S", "'t", "'re", "'VE", "'ll", "'ſ", "’s", " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n ", "\u00a0",
    "\u2003", "\u3000", "\u0085", "\u200b", "\u200d", "0", "7", "42", "1234567", "3.14", "²", "½", "٣", "a", "Z", "é",
    "e\u0301", "ß", "İ", "ǅ", "ﬁ", "日本", "한", "क्षि", "ไทย", "שָׁ", "🙂", "👩\u200d🚀", "🇩🇪", "!", "?!", "...", "--",
    "==", "(", ")", "_", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</s>", "the", " The", " of", "ing", "http://",
    "\x00", "\x1f",
)  # fmt: skip


def agreed_texts(tokenizer: Tokenizer, count: int = COUNT) -> list[str]:
    """`count` texts, always the same for a tokenizer; in NFC where it makes that of a text, for llama.cpp does not."""
    texts = [*ADVERSARIAL, *_random(tokenizer, count)][:count]
    composes = tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"
    return [normalize("NFC", text) for text in texts] if composes else texts


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
