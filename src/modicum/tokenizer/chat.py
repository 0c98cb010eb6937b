"""One renderer: the ids of a conversation, for training, evaluation, chat and serving alike.

The template's own control tokens are ids, every span between them is encoded whole as plain text. So the prompt
served is an exact prefix of the example trained on, and text from a user never becomes a control token.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from modicum.store import UserError
from modicum.tokenizer.conversation import Conversation, Region
from modicum.tokenizer.literals import Found, Literals
from modicum.tokenizer.special import THOUGHT_END, TOOL_MARKERS
from modicum.tokenizer.template import RenderedText, Template


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
    """Renders conversations with one template, or with none only texts.

    control: the added_tokens entries of the control tokens. encode: text to ids without control tokens. names: what
    the template's eos_token, pad_token and the like are.
    """

    def __init__(
        self,
        template: Template | None,
        control: Iterable[Mapping[str, Any]],
        encode: Callable[[str], list[int]],
        names: Mapping[str, str],
    ) -> None:
        entries = list(control)
        self._template = template
        self._names = names
        self._ids: dict[str, int] = {entry["content"]: entry["id"] for entry in entries}
        self._eats_left = {entry["content"] for entry in entries if entry["lstrip"]}
        self._eats_right = {entry["content"] for entry in entries if entry["rstrip"]}
        self._literals = Literals(self._ids)
        self._encode = encode
        self._moment: float | None = None

    def at(self, moment: float) -> "Renderer":
        """The same, for whose template it is always this moment, in seconds since the epoch."""
        fixed = copy(self)
        fixed._moment = moment
        return fixed

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Any = None,
        masked: bool = True,
    ) -> Rendered:
        """masked: whether assistant_mask is wanted; without it all of it is false.

        Raises UserError for a conversation that cannot be rendered. With a mask also for a template whose prompt for an
        assistant turn is not what that turn begins with, and for a token that spans the border of such a turn: a model
        trained on the one would be served the other."""
        template = self._template
        if template is None:
            raise UserError(
                "this tokenizer has no chat template, so conversations cannot be written; name one (chat.template: in "
                "a recipe) or put a chat_template.jinja beside its tokenizer.json"
            )
        # A template that cuts thoughts off past answers could not while the name of their mark is hidden from it.
        thoughts = THOUGHT_END in self._ids and THOUGHT_END in template.source
        conversation = Conversation(messages, tools, self._literals, thoughts=thoughts, avoid=template.source)
        # once: a clock that a template reads must not move between a prompt and its example
        now = time.time() if self._moment is None else self._moment

        def write(count: int, prompt: bool, hidden: bool = True) -> RenderedText:
            context = {
                "messages": (conversation.messages if hidden else conversation.plain_messages)[:count],
                "tools": conversation.tools if hidden else conversation.plain_tools,
                "documents": None,
                "add_generation_prompt": prompt,
                **self._names,
            }
            return template.render(context, now=now)

        count = len(conversation.messages)
        written = write(count, add_generation_prompt)
        if template.shipped:
            return self._tokens(written.text, written.blocks if masked else [], conversation.restore)
        if conversation.hides:
            as_is = write(count, add_generation_prompt, hidden=False)
            if conversation.restore(written.text) != as_is.text:
                self._refuse_rewriting(conversation, written.text, as_is.text)
                written, write = as_is, partial(write, hidden=False)
        # each turn is rendered again for it, and each token held against each turn: too much for who asks no mask
        regions = self._checked_regions(written, conversation.messages, write) if masked else []
        return self._tokens(written.text, regions, conversation.restore)

    def _refuse_rewriting(self, conversation: Conversation, hidden: str, as_is: str) -> None:
        """The template does not just pass strings on (it changes case, counts, compares). Then nothing may be hidden
        from it, which is safe while no name stands in the conversation and none comes about beside its words."""
        control = [[found.literal for found in self._literals.find(text)] for text in (hidden, as_is)]
        if conversation.holds_names or control[0] != control[1]:
            raise UserError(
                "chat.template: it changes a text that holds the name of a control token, or part of it; such a "
                "template cannot keep that text from becoming the token"
            )

    def encode_with_control(self, text: str) -> list[int]:
        """The ids of a text whose control tokens are meant."""
        return self._tokens(text, [], str).ids

    def _checked_regions(
        self, written: RenderedText, messages: Sequence[Mapping[str, Any]], write: Callable[[int, bool], RenderedText]
    ) -> list[Region]:
        """The assistant's regions: those the template marks, else from each prompt to the turn's last control token."""
        regions = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = write(place, True).text
            if not written.text.startswith(prompt):
                raise _not_a_prefix(place)
            if written.blocks:
                if all(start != len(prompt) for start, _ in written.blocks):
                    raise _not_a_prefix(place)
                continue
            turn = write(place + 1, False).text
            if not written.text.startswith(turn) or len(turn) < len(prompt):
                raise _not_a_prefix(place)
            ends = [found.end for found in self._literals.find(turn) if found.start >= len(prompt)]
            regions.append((len(prompt), ends[-1] if ends else len(turn)))
        return written.blocks or regions

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
    closed_inside = before.end == token.start and before.literal not in TOOL_MARKERS
    return any(
        end == token.start and not (closed_inside and start <= before.start < before.end) for start, end in regions
    )


def _not_a_prefix(place: int) -> UserError:
    return UserError(
        f"chat.template: the prompt for message {place + 1} (the messages before it, with add_generation_prompt) is "
        "not what that assistant turn begins with, so a model trained on the one would be served the other; write "
        "the same words in both places"
    )
