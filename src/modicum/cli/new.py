"""modicum new DIR"""

from pathlib import Path
from typing import Annotated

import typer

from modicum.cli.app import verb


@verb("new", "modicum new mymodel && cd mymodel && modicum run recipe.yaml")
def new(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist yet.")]) -> None:
    """Write a commented starter recipe beside a sample corpus."""
    from modicum.road.starter import write_starter

    written = write_starter(folder)
    print(f"wrote {', '.join(str(path) for path in written)}")
    print(f"next: cd {folder} && modicum run recipe.yaml")
