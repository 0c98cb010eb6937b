"""What the gate compared, in plain lines."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from modicum.cli.beside_table import cost_lines, judged_lines
from modicum.evaluate.divergence import Quality
from modicum.exchange import ExportReport, GgufReport, HfReport, OnnxReport
from modicum.exchange.continuing import Parted
from modicum.exchange.parity import Compared


def parity_lines(compared: Iterable[Compared]) -> list[str]:
    """A row a prompt: how far the logits are from the float64 reference's, and how far they might be."""
    rows = [("prompt", "difference", "allowed", "largest logit")]
    rows += [
        (
            f"{one.tokens} tokens" + ("" if one.how == "alone" else f" {one.how}"),
            f"{one.difference:.2e}",
            "-" if one.allowed is None else f"{one.allowed:.2e}",
            f"{one.largest:.3g}",
        )
        for one in compared
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        f"  {row[0].ljust(widths[0])}  " + "  ".join(cell.rjust(widths[place]) for place, cell in enumerate(row[1:], 1))
        for row in rows
    ]


def export_lines(checkpoint: Path, report: ExportReport | GgufReport | HfReport | OnnxReport) -> list[str]:
    """What was written of the checkpoint, what was compared, and where it lies."""
    runtime, kind, lines, written = _told(report)
    return [
        f"{checkpoint} for {runtime}: {report.parameters:,} parameters as {kind}",
        *lines,
        f"written: {', '.join(str(report.out / name) for name in written)}",
    ]


def _told(
    report: ExportReport | GgufReport | HfReport | OnnxReport,
) -> tuple[str, str, list[str], tuple[str, ...]]:
    """What reads it, its number type, its lines, and the files to look at."""
    match report:
        case GgufReport():
            return "llama.cpp", report.quant, _gguf(report), (report.file, "parity.json")
        case OnnxReport():
            return "onnxruntime", report.quant, _onnx(report), (report.file, "genai_config.json", "parity.json")
        case HfReport():
            reader = f"transformers ({report.architecture})"
            return reader, report.dtype, _hf(report), ("", "README.md", "parity.json")
        case ExportReport():
            return report.to, "float32", _cyberslm(report), ("",)


def _cyberslm(report: ExportReport) -> list[str]:
    return [f"  {report.tensors} tensors", *(f"  {note}" for note in report.notes), *parity_lines(report.compared)]


def _hf(report: HfReport) -> list[str]:
    told = (
        "the evaluation of this checkpoint" if report.evaluated else "no evaluation: none of this checkpoint is there"
    )
    return [
        *parity_lines(report.compared),
        *_strings(report.strings, report.unicode),
        *judged_lines(report.judged, report.limits),
        f"  the model card has {told}",
        f"  {report.bytes:,} bytes in {', '.join(report.files)}; the checkpoint's weights are "
        f"{report.checkpoint_bytes:,}",
    ]


def _gguf(report: GgufReport) -> list[str]:
    proof = report.proof
    lines = [
        *parity_lines(proof.compared),
        *([] if proof.prompts is None else _prompts(proof.prompts)),
        f"  {proof.keys} keys and {proof.tensors} tensors read back bit for bit",
        *_strings(proof.strings, proof.unicode),
        *judged_lines(proof.judged, report.limits),
        *_continuations(proof.continuations, proof.steps, proof.parted),
        *_costs(report),
        *(f"  {note}" for note in report.notes),
    ]
    reasons = groupby(sorted(report.fallbacks, key=lambda item: item[1:]), key=lambda item: item[1:])
    for (kind, reason), tensors in reasons:
        lines.append(f"  as {kind} instead ({reason}): {', '.join(name for name, _, _ in tensors)}")
    return lines


def _onnx(report: OnnxReport) -> list[str]:
    proof = report.proof
    return [
        *parity_lines(proof.compared),
        *_prompts(proof.prompts),
        f"  {proof.weights} weights read back bit for bit",
        *_strings(proof.strings, proof.unicode),
        *judged_lines(proof.judged, report.limits),
        *_continuations(proof.continuations, proof.steps, proof.parted),
        *_costs(report),
        *(f"  {note}" for note in report.notes),
    ]


def _prompts(quality: Quality) -> list[str]:
    return [
        f"  on those prompts: mean KL divergence {quality.mean_kl:.2e}, 99th percentile {quality.tail_kl:.2e}, "
        f"top-1 agreement {quality.agreement:.2%}"
    ]


def _strings(count: int, unicode: str) -> list[str]:
    return [f"  {count:,} strings (Unicode {unicode}) with the same ids"]


def _continuations(count: int, steps: int, parted: Sequence[Parted]) -> list[str]:
    """How many are the same, where the others part, and whether the two tokens were as good as equal."""
    return [
        f"  {count - len(parted)} of {count} greedy continuations of {steps} tokens the same to the end",
        *(
            f"    number {one.continuation} parts at token {one.step}: {one.theirs} there, {one.ours} here, ahead by "
            f"{one.margin:.2g}{', as good as equal' if one.near else ''}"
            for one in parted
        ),
    ]


def _costs(report: GgufReport | OnnxReport) -> list[str]:
    """Beside full precision, where it is another."""
    if report.full is None or report.cost == report.full:
        return cost_lines((report.quant,), (report.cost,))
    return cost_lines(("full precision", report.quant), (report.full, report.cost))
