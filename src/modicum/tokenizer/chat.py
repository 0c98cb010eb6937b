"""One renderer: the ids of a conversation, for training, evaluation, chat and serving alike.

The template's own control tokens are ids, every span between them is encoded whole as plain text. So the prompt
served is an exact prefix of the example trained on, and text from a user never becomes a control token.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from modicum.store import UserError
from modicum.tokenizer.conversation import Protected
from modicum.tokenizer.literals import Found, Literals
from modicum.tokenizer.special import EOT, PAD, TOOL_MARKERS
from modicum.tokenizer.template import Template

Region = tuple[int, int]  # (start, end) in characters of the rendered text, placeholders still in it


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation.

    ids: token ids. assistant_mask: as long; true on the tokens of assistant content and on the end-of-turn token that
    closes it. text: what the ids say, control tokens written out.
    """

    ids: list[int]
    assistant_mask: list[bool]
    text: str


class Renderer:
    """Renders conversations with one template.

    control: the added_tokens entries of the control tokens. encode: text to ids without control tokens.
    """

    def __init__(
        self, template: Template, control: Iterable[Mapping[str, Any]], encode: Callable[[str], list[int]]
    ) -> None:
        entries = list(control)
        self._template = template
        self._ids: dict[str, int] = {entry["content"]: entry["id"] for entry in entries}
        self._eats_left = {entry["content"] for entry in entries if entry["lstrip"]}
        self._eats_right = {entry["content"] for entry in entries if entry["rstrip"]}
        self._literals = Literals(self._ids)
        self._encode = encode

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, tools: Any = None
    ) -> Rendered:
        """Raises UserError for a conversation that cannot be rendered, and for a template whose prompt for an
        assistant turn is not what that turn begins with: a model trained on the one would be served the other."""
        conversation = Protected(messages, tools, self._literals)
        now = time.time()  # once: a clock that a template reads must not move between a prompt and its example

        def rendered(count: int, prompt: bool) -> tuple[str, list[Region]]:
            context = {
                "messages": conversation.messages[:count],
                "tools": conversation.tools,
                "documents": None,
                "add_generation_prompt": prompt,
                "eos_token": EOT,
                "pad_token": PAD,
            }
            answer = self._template.render(context, now=now)
            return answer.text, answer.blocks

        text, regions = rendered(len(conversation.messages), add_generation_prompt)
        if not self._template.shipped:
            regions = self._checked_regions(text, regions, conversation.messages, rendered)
        return self._tokens(text, regions, conversation.restore)

    def encode_with_control(self, text: str) -> list[int]:
        """The ids of a text whose control tokens are meant."""
        return self._tokens(text, [], str).ids

    def _checked_regions(
        self,
        text: str,
        blocks: list[Region],
        messages: Sequence[Mapping[str, Any]],
        rendered: Callable[[int, bool], tuple[str, list[Region]]],
    ) -> list[Region]:
        """The assistant's regions in `text`: those the template marks, or those between a turn's prompt and its end."""
        regions = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt, _ = rendered(place, True)
            if not text.startswith(prompt):
                raise _not_a_prefix(place)
            if blocks:
                if not any(start == len(prompt) for start, _ in blocks):
                    raise _not_a_prefix(place)
                continue
            until, _ = rendered(place + 1, False)
            if not text.startswith(until) or len(until) < len(prompt):
                raise _not_a_prefix(place)
            ends = [found.end for found in self._literals.find(until) if found.start >= len(prompt)]
            regions.append((len(prompt), ends[-1] if ends else len(until)))
        return blocks or regions

    def _tokens(self, text: str, regions: list[Region], restore: Callable[[str], str]) -> Rendered:
        ids: list[int] = []
        mask: list[bool] = []
        found = [Found(0, 0, ""), *self._literals.find(text), Found(len(text), len(text), "")]
        for before, after in pairwise(found):
            span = self._span(text, before, after)
            for piece, inside in self._cut(span, regions, text, restore):
                ids += piece
                mask += [inside] * len(piece)
            if after.literal:
                ids.append(self._ids[after.literal])
                mask.append(_is_supervised(before, after, regions))
        return Rendered(ids, mask, restore(text))

    def _span(self, text: str, before: Found, after: Found) -> Region:
        """The plain text between two control tokens; those of some tokenizers swallow white space beside them."""
        start, end = before.end, after.start
        if before.literal in self._eats_right:
            start += len(text[start:end]) - len(text[start:end].lstrip())
        if after.literal in self._eats_left:
            end -= len(text[start:end]) - len(text[start:end].rstrip())
        return start, end

    def _cut(
        self, span: Region, regions: list[Region], text: str, restore: Callable[[str], str]
    ) -> Iterable[tuple[list[int], bool]]:
        """The span's ids, encoded whole, cut where a region begins or ends: (ids, whether they are the assistant's)."""
        start, end = span
        if start == end:
            return
        ids = self._encode(restore(text[start:end]))
        cuts = sorted({place for region in regions for place in region if start < place < end})
        done = 0
        for left, right in pairwise([start, *cuts, end]):
            if right == end:
                upto = len(ids)
            else:
                head = self._encode(restore(text[start:right]))
                upto = len(head)
                if ids[:upto] != head:
                    raise UserError(
                        "chat.template: a token spans the border of an assistant turn, so the prompt served would not "
                        "be a prefix of the example trained on; put a control token or a line break there, and trim "
                        "the content"
                    )
            yield ids[done:upto], any(a <= left and right <= b for a, b in regions)
            done = upto


def _is_supervised(before: Found, token: Found, regions: list[Region]) -> bool:
    """Whether a control token is the assistant's: inside a region, or the end of turn that closes one from outside."""
    if any(start <= token.start and token.end <= end for start, end in regions):
        return True
    ends_here = any(start < end == token.start for start, end in regions)
    already_closed = before.end == token.start and before.literal not in ("", *TOOL_MARKERS)
    return ends_here and not already_closed


def _not_a_prefix(place: int) -> UserError:
    return UserError(
        f"chat.template: the prompt for message {place + 1} (the messages before it, with add_generation_prompt) is "
        "not what that assistant turn begins with, so a model trained on the one would be served the other; write "
        "the same words in both places"
    )
