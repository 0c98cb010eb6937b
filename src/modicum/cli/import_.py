"""modicum import PATH --dialect NAME --out DIR"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.app import verb
from modicum.cli.options import ReportAsJson


class DialectName(StrEnum):
    """The dialects that are read."""

    CYBERSLM = "cyberslm"
    SLM = "slm"
    CORE = "core"
    HF = "hf"
    GGUF = "gguf"


@verb("import", "modicum import cyberslm-instruct/model.pt --dialect cyberslm --out models/cyberslm")
def import_(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The foreign checkpoint: its file, or its folder.")],
    dialect: Annotated[
        DialectName,
        typer.Option(help="Whose it is; hf: a folder of Llama, Qwen2, Qwen3 or Mistral; gguf: llama or qwen3."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The checkpoint to write, a new folder.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A tokenizer.json or tokenizer.model, where none lies beside the weights."),
    ] = None,
    as_json: ReportAsJson = False,
) -> None:
    """Make an ordinary checkpoint of a foreign one, when its logits are proven to be the same.

    Nothing in the foreign files is executed. When something is missing, left over or different, nothing is written.
    """
    from modicum.cli.progress import TerminalListener
    from modicum.exchange import import_checkpoint

    with TerminalListener() as listener:
        report = import_checkpoint(path, dialect=dialect.value, out=out, tokenizer=tokenizer, progress=listener.say)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        return
    from modicum.cli.parity_table import parity_lines

    print(f"{report.architecture} from {path}")
    print(f"  {report.parameters:,} parameters in {report.tensors} tensors, {report.dtype}, as {report.written_as}")
    print(f"  {report.tokenizer_ids:,} ids from {report.tokenizer}, {report.vocabulary:,} rows in the embedding")
    if report.left_aside:
        print(f"  not read from its file: {', '.join(report.left_aside)}")
    print("\n".join([*(f"  {note}" for note in report.notes), *parity_lines(report.compared)]))
    print(f"written: {out}")
