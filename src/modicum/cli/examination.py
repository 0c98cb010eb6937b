"""How a finding of the doctor's looks on a terminal, and a conversation with what is supervised in it."""

from rich.text import Text

from modicum.cli.console import PlainConsole
from modicum.doctor.chat import MarkedConversation
from modicum.doctor.finding import Finding

_STYLES = {"ok": "green", "failed": "bold red", "told": "cyan"}


def printed(item: Finding | MarkedConversation) -> None:
    """Print one item on standard output; nothing in it is taken for markup."""
    console = PlainConsole()
    console.print(finding_line(item) if isinstance(item, Finding) else marked_text(item))


def finding_line(finding: Finding) -> Text:
    return Text.assemble((f"{finding.outcome:7}", _STYLES[finding.outcome]), f"{finding.name}: {finding.detail}")


def marked_text(conversation: MarkedConversation) -> Text:
    """The rendered conversation, indented; what is supervised stands between ⟦ and ⟧, which show without colours."""
    text = Text(f"{conversation.origin}, what the loss counts between ⟦ and ⟧:\n")
    for piece, counts in conversation.pieces:
        text.append(f"⟦{piece}⟧" if counts else piece, style="bold green" if counts else "dim")
    text.rstrip()
    return Text("\n").join([line if number == 0 else Text("  ") + line for number, line in enumerate(text.split("\n"))])
