"""Text as the rest of the road expects it: Unicode NFC, one kind of line end, no control characters."""

import re
import unicodedata

# C0 and C1 controls and DEL, but not tab and newline; what a terminal or a tokenizer would trip over
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BOM = "\ufeff"


def clean(text: str) -> str:
    """`text` in NFC, with CRLF and CR as newline, control characters other than tab and newline removed, without a
    byte order mark at its start. Cleaning twice gives the same as once."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return unicodedata.normalize("NFC", _CONTROLS.sub("", text).lstrip(_BOM))
