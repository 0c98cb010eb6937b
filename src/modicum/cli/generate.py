"""modicum generate CKPT --prompt TEXT"""

import json
import sys
from typing import Annotated

import typer

from modicum.cli.app import verb
from modicum.cli.options import (
    NEVER_TALKED,
    Checkpoint,
    MaxNewTokens,
    MinP,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from modicum.cli.reading import read_text


@verb("generate", "modicum generate runs/quickstart/sft/checkpoints/last --prompt 'What is CWE-79?' --chat")
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[
        str | None, typer.Option(help="The text to go on from; without it, standard input is read.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's turn, not the start of a text.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message (with --chat).")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.8,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Continue a text, or answer one question."""
    from modicum.checkpoint import load_checkpoint
    from modicum.generate import Generator, SamplingParams
    from modicum.generate.chat import without_break
    from modicum.store import UserError

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )
    if system is not None and not chat:
        raise UserError("--system: needs --chat, which makes the prompt a conversation")
    text = read_text(sys.stdin.read) if prompt is None else prompt
    if chat and prompt is None:
        text = text.rstrip("\r\n")  # it ends the line that was piped, not the question
    loaded = load_checkpoint(checkpoint)
    if chat and not loaded.talks:
        print(f"{checkpoint}: {NEVER_TALKED}", file=sys.stderr)
    tokenizer = loaded.tokenizer
    generator = Generator(loaded.model(), tokenizer, stop_ids=loaded.stop_ids, opening=loaded.opening)
    if chat:
        messages = [{"role": "system", "content": system}] if system else []
        rendered = tokenizer.render([*messages, {"role": "user", "content": text}], add_generation_prompt=True)
        ids = rendered.ids
        answer = without_break(generator.stream(ids, params), rendered, tokenizer)
    else:
        ids = generator.text_prompt(text)
        answer = generator.stream(ids, params)
    if as_json:
        chunks = list(answer)
        said = [token for chunk in chunks for token in chunk.ids]
        print(
            json.dumps(
                {
                    "text": "".join(chunk.text for chunk in chunks),
                    "finish_reason": chunks[-1].finish_reason,
                    "prompt_tokens": len(ids),
                    "completion_tokens": len(said),
                    "ids": said,
                    "logprobs": [logprob for chunk in chunks for logprob in chunk.logprobs],
                },
                ensure_ascii=False,
            )
        )
        return
    for chunk in answer:
        print(chunk.text, end="", flush=True)
    print()
