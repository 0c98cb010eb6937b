"""The model card of an exported checkpoint: what it is, what it was measured to do, and the licences of its texts.

Figures and licences come from the run that the checkpoint lies in. What is not there, was measured on another
checkpoint or prepared after it was trained is not written; nothing is made up.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from modicum.checkpoint import Checkpoint, step_folder
from modicum.evaluate.texts import run_of, trained_beside
from modicum.store import RunDirectory, hash_file, read_json

_HEAD = """---
library_name: transformers
pipeline_tag: text-generation
license: other
tags:
- modicum
---

"""
_USE = """
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
inputs = {inputs}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```
"""
_CHAT = (
    'tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True, '
    'return_dict=True, return_tensors="pt")'
)
_UNTOLD = "Which texts it was trained on is not known here: name their licences before it is given to others."
_CALLED = {"pretrain": "base", "sft": "chat"}  # what an evaluation calls a stage's model
_PLAIN = 'tokenizer("Once", return_tensors="pt")'


def model_card(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[str, bool]:
    """README.md of this checkpoint written as `dtype`, and whether an evaluation of it was found."""
    run, model = run_of(checkpoint.path), _CALLED.get(checkpoint.path.resolve().parent.parent.name, "")
    name = f"{run.name} ({model})" if run else checkpoint.path.resolve().name
    config = checkpoint.config
    kind = config.to_hf()["architectures"][0]
    table = _table(
        ("", ""),
        [
            ("parameters", f"{config.parameter_count():,}"),
            ("architecture", f"{kind}, {config.num_hidden_layers} layers of width {config.hidden_size}"),
            ("heads", f"{config.num_attention_heads}, {config.num_key_value_heads} of keys and values"),
            ("vocabulary", f"{config.vocab_size:,}"),
            ("context", f"{config.max_position_embeddings:,} tokens"),
            ("number type", str(dtype).removeprefix("torch.")),
        ],
    )
    evaluation = _evaluation(run, model, checkpoint.path) if run else []
    texts = _texts(RunDirectory(run), checkpoint.path.resolve().parent.parent.name) if run else [_UNTOLD]
    lines = [
        f"# {name}",
        "",
        f"A language model {'trained with' if checkpoint.was_trained else 'handed on by'} modicum.",
        "",
        *table,
        _USE.format(name="path/of/this/folder", inputs=_CHAT if checkpoint.talks else _PLAIN),
        "## Evaluation",
        "",
        *(evaluation or ["No evaluation of this checkpoint lies with it."]),
        *(
            ["", "Measured at full precision, before the numbers were rounded."]
            if evaluation and dtype != torch.float32
            else []
        ),
        "",
        "## Texts it was trained on",
        "",
        *texts,
    ]
    return _HEAD + "\n".join(lines) + "\n", bool(evaluation)


def _evaluation(run: Path, model: str, checkpoint: Path) -> list[str]:
    """The table of results.json, where it is this very checkpoint that was measured."""
    manifest, results = run / "evaluate" / "manifest.json", run / "evaluate" / "results.json"
    if not (manifest.is_file() and results.is_file() and (checkpoint / "manifest.json").is_file()):
        return []
    if read_json(manifest).get("inputs", {}).get(model) != hash_file(checkpoint / "manifest.json"):
        return []
    found = read_json(results)
    rows = []
    bits = found.get("heldout", {}).get(model)
    if bits:
        rows.append(("held-out text, bits per byte (lower is better)", _interval(bits["total"], "bits_per_byte", "")))
        rows += [
            (f"- {domain}", _interval(figures, "bits_per_byte", "")) for domain, figures in bits["domains"].items()
        ]
    score = found.get("choices", {}).get(model)
    if score:
        named = f"multiple choice, {score['n']} questions (chance {score['chance']:.1%})"
        rows.append((named, _interval(score, "accuracy", "%")))
    answers = found.get("answers", {}).get("chat") if model == "chat" else None
    if answers:
        rows.append((f"answers that end within {answers['max_new_tokens']} tokens", f"{answers['stop_rate']:.1%}"))
    return _table(("measure", "value (95 % interval)"), rows)


def _interval(figures: Mapping[str, float | None], key: str, unit: str) -> str:
    shown = ".1%" if unit else ".3f"
    value = f"{figures[key]:{shown}}"
    return value if figures["low"] is None else f"{value} ({figures['low']:{shown}} to {figures['high']:{shown}})"


def _texts(run: RunDirectory, stage: str) -> list[str]:
    """What the stage's model learned from: the corpus, and what came before and after it."""
    lines = _licences(run, stage) or [_UNTOLD]
    tokenizer = run.stage("tokenizer").manifest()
    if tokenizer is not None and "model.checkpoint" in tokenizer.inputs:
        lines += ["", "It began as another model, whose texts and licence come on top: name them here."]
    if stage == "sft":
        lines += ["", "It was tuned on conversations besides; their licences stand where they came from."]
    return lines


def _licences(run: RunDirectory, stage: str) -> list[str]:
    """Of the corpus, by source and licence, as its records name them; none where another corpus lies in the run by now,
    or the base model was taken over as it was."""
    report = run.path / "corpus" / "text" / "report.json"
    taken_over = step_folder(run.checkpoints("pretrain"), 0).exists()
    if taken_over or not report.is_file() or not trained_beside(run, stage):
        return []
    rows = [
        (source["name"], licence, f"{share['documents']:,}", f"{share['bytes'] / 1e6:.2f} MB")
        for source in read_json(report)["sources"]
        for licence, share in source["licences"].items()
    ]
    return _table(("source", "licence", "documents", "size"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ("---",) * len(head), *rows)]
