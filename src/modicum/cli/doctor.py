"""modicum doctor [RECIPE|CKPT]"""

from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.app import verb


@verb("doctor", "modicum doctor recipes/quickstart.yaml")
def doctor(
    target: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE|CKPT]", help="A recipe's file or a checkpoint's folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine, and with it a recipe (its model and conversations) or a checkpoint.

    Exit status: 0 all well, 1 our own arithmetic is wrong here, 2 something in your files is for you to mend.
    """
    from modicum.cli.examination import printed
    from modicum.doctor.examine import Examination, examine

    found = Examination()
    for item in examine(target):
        found.add(item)
        if not as_json:
            printed(item)
    if as_json:
        import json

        print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
    raise typer.Exit(found.exit_status)
