"""A plan in plain lines, aligned, for a terminal or a file."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from modicum.road.chips import ASSUMED_SHARE, Elsewhere
from modicum.road.plan import Plan
from modicum.road.sizes import OPTIMAL_TOKENS_PER_PARAMETER
from modicum.road.words import count, duration, percent, short, size, three_figures


def plan_lines(plan: Plan) -> list[str]:
    """Model, text, stages, memory, disk, notes."""
    return [
        f"{plan.name} on {plan.machine}",
        *_block("model", _model(plan)),
        *_block("text", _text(plan)),
        *_block("stages", _stages(plan)),
        *_block(f"memory at most, while {plan.memory.stage} runs", _memory(plan)),
        *_block("disk", _disk(plan)),
        *(_block("elsewhere", _elsewhere(plan.elsewhere)) if plan.elsewhere else []),
        *(["", "within the budget as it is"] if plan.changes == () else []),
        *([""] if plan.changes else []),
        *(f"change: {change}" for change in plan.changes or ()),
        *([""] if plan.notes else []),
        *(f"note: {note}" for note in plan.notes),
    ]


Row = Sequence[str]


def _block(title: str, rows: Sequence[Row]) -> Iterator[str]:
    """Rows as columns: the first to the left, figures to the right."""
    widths = [max(len(row[place]) for row in rows if place < len(row)) for place in range(max(map(len, rows)))]
    yield ""
    yield title
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(widths[place]) for place, cell in enumerate(row[1:], start=1))]
        yield f"  {'  '.join(cells)}".rstrip()


def _model(plan: Plan) -> list[Row]:
    parts = plan.parameters
    rows = [(name, count(number), percent(number / parts.total)) for name, number in asdict(parts).items() if number]
    tied = [] if parts.head else [("head", "tied")]
    return [*rows, *tied, ("parameters", count(parts.total))]


def _text(plan: Plan) -> list[Row]:
    text = plan.text
    about = "" if text.exact else "about "
    rows = []
    if text.tokens is not None and text.bytes is not None:
        rows = [("corpus", f"{about}{short(text.tokens)} tokens", size(text.bytes))]
    if text.talk is not None:
        rows.append(("conversations", f"about {short(text.talk.tokens)} tokens", count(text.talk.conversations)))
    rows.append(("read in pretraining", f"{short(plan.tokens)} tokens", _epochs(plan)))
    ratio = (
        f"{three_figures(plan.tokens_per_parameter)} (compute is best spent at about {OPTIMAL_TOKENS_PER_PARAMETER})"
    )
    return [*rows, ("tokens a parameter", ratio)]


def _epochs(plan: Plan) -> str:
    return f"{three_figures(max(plan.text.epochs.values()))} times over" if plan.text.epochs else ""


def _stages(plan: Plan) -> list[Row]:
    rows = [("", "updates", "tokens", "FLOPs", "tokens/s", "memory", "time")]
    for stage in plan.stages:
        rows.append(
            (
                stage.name,
                count(stage.steps) if stage.steps else "",
                short(stage.tokens) if stage.tokens else "",
                f"{stage.flops:.2e}" if stage.flops else "",
                count(stage.tokens_per_second) if stage.tokens_per_second else "",
                size(stage.peak_memory_bytes) if stage.peak_memory_bytes else "",
                duration(stage.seconds) if stage.seconds is not None else "not known",
            )
        )
    total = duration(plan.seconds) if plan.seconds is not None else "not known"
    how = f"measured on {plan.how}" if plan.how else "not measured"
    return [*rows, ("whole run", "", "", f"{plan.flops:.2e}", "", size(plan.memory.total), total), (how,)]


def _memory(plan: Plan) -> list[Row]:
    memory = plan.memory
    names = {
        "program": "program",
        "weights": "weights",
        "gradients": "gradients",
        "optimizer": "optimizer",
        "whole": "gathered from other ranks",
        "logits": "logits",
        "activations": "activations and work space",
    }
    rows = [(words, size(getattr(memory, name))) for name, words in names.items() if getattr(memory, name)]
    kind = "measured" if memory.measured else "estimated"
    return [*rows, (f"together, {kind}", size(memory.total)), ("there is", size(plan.memory_limit))]


def _disk(plan: Plan) -> list[Row]:
    rows = [(name, size(number)) for name, number in asdict(plan.disk).items()]
    return [*rows, ("together", size(plan.disk.total)), ("free", size(plan.free_disk))]


def _elsewhere(found: Elsewhere) -> list[Row]:
    computed = f"computed from its published peak at {percent(ASSUMED_SHARE)} of it, not measured"
    return [
        (f"training on {found.gpus} x {found.chip.name}: {duration(found.seconds)} ({computed})",),
        (f"a chip's memory: {size(found.replicated_bytes)} with a whole copy, {size(found.sharded_bytes)} shared out",),
        (found.fits,),
    ]
