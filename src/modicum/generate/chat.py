"""A conversation that goes on: what was said, and what of it still fits into the context."""

from collections.abc import Generator as Stream
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from modicum.generate.answer import Chunk
from modicum.generate.generator import Generator, Kept
from modicum.generate.params import SamplingParams
from modicum.store import UserError
from modicum.tokenizer import Rendered, Tokenizer


class ChatSession:
    """Turns with one model. `messages` is what the model will read next time, the system message first; what it has
    read of them is kept, so that a turn costs what is new in it.

    reserve: tokens kept free for an answer; by default max_new_tokens, but at most a quarter of the context.
    """

    def __init__(
        self,
        generator: Generator,
        params: SamplingParams,
        *,
        system: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        reserve: int | None = None,
    ) -> None:
        self.generator = generator
        self.params = params
        self.tools = list(tools) if tools else None
        self.system = system
        self.notice: str | None = None
        self._turns: list[list[dict[str, Any]]] = []
        self._reserve = min(params.max_new_tokens, generator.context // 4) if reserve is None else reserve
        self._asked = 0
        self._kept = Kept()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages from the system's to the last answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + [message for turn in self._turns for message in turn]

    def reset(self) -> None:
        """Forget every turn; the system message stays. The same questions then get the same answers again."""
        self._turns, self._asked, self.notice, self._kept = [], 0, None, Kept()

    def ask(self, text: str) -> str:
        """The whole answer to `text`."""
        return "".join(chunk.text for chunk in self.stream(text))

    def stream(self, text: str) -> Stream[Chunk, None, None]:
        """The answer to `text`, in pieces. Question and answer are remembered once the answer is over, as far as it was
        said also when the iterator is closed early or the user interrupts it; after an error nothing is.

        When the context is full, the oldest turns are forgotten for good and `notice` says how many; else it is None.
        Raises UserError for a blank text, and for one that does not fit even alone.
        """
        if not text.strip():
            raise UserError("the message is blank; say something")
        question = {"role": "user", "content": text}
        rendered = self._make_room(question)
        # another seed for each turn, or the same random numbers would return in every answer
        params = replace(self.params, seed=self.params.seed + self._asked)
        self._asked += 1
        answer = self.generator.stream(rendered.ids, params, kept=self._kept)
        return self._remember(question, without_break(answer, rendered, self.generator.tokenizer))

    def _remember(self, question: dict[str, Any], chunks: Iterator[Chunk]) -> Stream[Chunk, None, None]:
        said = ""
        try:
            for chunk in chunks:
                said += chunk.text
                yield chunk
        except (GeneratorExit, KeyboardInterrupt):
            self._turns.append([question, {"role": "assistant", "content": said}])
            raise
        self._turns.append([question, {"role": "assistant", "content": said}])

    def _make_room(self, question: dict[str, Any]) -> Rendered:
        """The prompt, after dropping as many of the oldest turns as it takes."""
        room = self.generator.context - self._reserve
        turns = self._turns
        while True:
            prompt = self._render([*turns, [question]])
            if len(prompt.ids) <= room:
                break
            if not turns:
                raise UserError(
                    f"the message and the system message have {len(prompt.ids)} tokens, but only {room} of the context "
                    f"of {self.generator.context} are left beside the answer; shorten them"
                )
            turns = turns[1:]
        dropped = len(self._turns) - len(turns)
        self._turns = turns
        plural = "turns are" if dropped > 1 else "turn is"
        self.notice = f"the context is full: the oldest {dropped} {plural} forgotten" if dropped else None
        return prompt

    def _render(self, turns: list[list[dict[str, Any]]]) -> Rendered:
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = system + [message for turn in turns for message in turn]
        # nothing is trained on it, and the mask is refused where a prompt is not what past turns begin with
        return self.generator.tokenizer.render(messages, add_generation_prompt=True, tools=self.tools, masked=False)


def without_break(
    chunks: Stream[Chunk, None, None], prompt: Rendered, tokenizer: Tokenizer
) -> Stream[Chunk, None, None]:
    """The chunks of the answer to a conversation, without the line break of the header before it.

    A tokenizer that folds white space leaves the break at the prompt's end out, and the answer's first token brings it,
    as a space.
    """
    folded = prompt.text[-1:].isspace() and not tokenizer.id_bytes(prompt.ids[-1])[-1:].isspace()
    for chunk in chunks:
        text = chunk.text.removeprefix(" ") if folded else chunk.text
        folded = folded and not chunk.text
        yield replace(chunk, text=text)
