"""What the gate compared, in plain lines."""

from collections.abc import Iterable
from itertools import groupby

from modicum.evaluate.divergence import Limits, Quality
from modicum.exchange import GgufReport, HfReport, OnnxReport
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


def quality_lines(quality: Quality, limits: Limits) -> list[str]:
    """How far the model's own texts are from full precision."""
    return [
        f"  on {quality.positions:,} positions of the model's own texts, beside full precision:",
        f"    KL divergence {quality.mean_kl:.2e} nats in the mean (allowed {limits.mean_kl:g}), "
        f"{quality.tail_kl:.2e} at the 99th percentile (allowed {limits.tail_kl:g})",
        f"    top-1 agreement {quality.agreement:.2%} (asked for {limits.agreement:.2%})",
        f"    with a first choice ahead by more than 0.01: {quality.clear:,}; another one at {quality.clear_differing}",
    ]


def parted_lines(parted: Iterable[Parted]) -> list[str]:
    """Where greedy continuations part, and whether the two tokens were as good as equal."""
    return [
        f"    number {one.continuation} parts at token {one.step}: {one.theirs} there, {one.ours} here, ahead by "
        f"{one.margin:.2g}{', as good as equal' if one.near else ''}"
        for one in parted
    ]


def hf_lines(report: HfReport) -> list[str]:
    """What the folder says, read back; how far rounding moved it; its files, and what its card tells."""
    told = (
        "the evaluation of this checkpoint" if report.evaluated else "no evaluation: none of this checkpoint is there"
    )
    return [
        *parity_lines(report.compared),
        *quality_lines(report.quality, report.limits),
        f"  the model card has {told}",
        f"  {report.bytes:,} bytes in {', '.join(report.files)}; the checkpoint's weights are "
        f"{report.checkpoint_bytes:,}",
    ]


def gguf_lines(report: GgufReport) -> list[str]:
    """What llama.cpp said of the file: prompts, vocabulary, the model's own texts, size, and what took another type."""
    proof = report.proof
    prompts = (
        []
        if proof.prompts is None
        else [
            f"  on those prompts: mean KL divergence {proof.prompts.mean_kl:.2e}, "
            f"99th percentile {proof.prompts.tail_kl:.2e}, top-1 agreement {proof.prompts.agreement:.2%}"
        ]
    )
    lines = [
        *parity_lines(proof.compared),
        *prompts,
        f"  {proof.keys} keys and {proof.tensors} tensors read back bit for bit",
        f"  {proof.texts:,} texts (Unicode {proof.unicode}) with the same ids",
        *quality_lines(report.proof.quality, report.limits),
        f"  {proof.same_continuations} of {proof.continuations} greedy continuations the same to the end",
        *parted_lines(proof.parted),
        f"  bits per byte of those texts {proof.bits_per_byte:.4f}, at full precision {proof.full_bits_per_byte:.4f}",
        *(f"  {note}" for note in report.notes),
        f"  {report.bytes:,} bytes; the checkpoint's weights are {report.checkpoint_bytes:,}",
    ]
    reasons = groupby(sorted(report.fallbacks, key=lambda item: item[1:]), key=lambda item: item[1:])
    for (kind, reason), tensors in reasons:
        lines.append(f"  as {kind} instead ({reason}): {', '.join(name for name, _, _ in tensors)}")
    return lines


def onnx_lines(report: OnnxReport) -> list[str]:
    """What onnxruntime said of the folder, where it goes on otherwise, and what it costs there."""
    proof, cost, full = report.proof, report.cost, report.full
    rows = [
        ("", "fp32", report.quant),
        ("on disk", f"{full.disk_bytes / 1e6:.1f} MB", f"{cost.disk_bytes / 1e6:.1f} MB"),
        ("to load", f"{full.load_seconds:.2f} s", f"{cost.load_seconds:.2f} s"),
        ("in memory", f"{full.memory_bytes / 1e6:.0f} MB", f"{cost.memory_bytes / 1e6:.0f} MB"),
        ("one answer", f"{full.tokens_per_second:.0f} tokens/s", f"{cost.tokens_per_second:.0f} tokens/s"),
        ("bits per byte", f"{proof.full_bits_per_byte:.4f}", f"{proof.bits_per_byte:.4f}"),
    ]
    return [
        *parity_lines(proof.compared),
        f"  on those prompts: mean KL divergence {proof.prompts.mean_kl:.2e}, "
        f"99th percentile {proof.prompts.tail_kl:.2e}, top-1 agreement {proof.prompts.agreement:.2%}",
        f"  {proof.weights} weights read back bit for bit",
        f"  {proof.texts:,} texts (Unicode {proof.unicode}) with the same ids",
        *quality_lines(proof.quality, report.limits),
        f"  {proof.continuations - len(proof.parted)} of {proof.continuations} greedy continuations of {proof.steps} "
        "tokens the same to the end",
        *parted_lines(proof.parted),
        *(f"  {a:14}{b:>16}" + (f"{c:>16}" if report.quant != "fp32" else "") for a, b, c in rows),
    ]
