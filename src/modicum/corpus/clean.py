"""Text as the rest of the road expects it: Unicode NFC, one kind of line end, no control characters."""

import re
import unicodedata

# C0 and C1 controls and DEL, but not tab and newline; what a terminal or a tokenizer would trip over
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")
# further line ends by Unicode (UAX 14, class BK and NL): removed, they would glue two words
_LINE_ENDS = re.compile("\r\n|[\r\x0b\x0c\x85]")
_BOM = "\ufeff"


def clean(text: str) -> str:
    """`text` in NFC, with CRLF, CR, NEL, form feed and vertical tab as newline, control characters other than tab and
    newline removed, without a byte order mark at its start. Cleaning twice gives the same as once."""
    text = _LINE_ENDS.sub("\n", text)
    return unicodedata.normalize("NFC", _CONTROLS.sub("", text).lstrip(_BOM))
