"""The command line: one thin module a verb; argument, call, print. Nothing here computes.

Exit status: 0 done, 2 the user's to mend, 130 interrupted, 1 ours.
"""

from modicum.cli.app import main

__all__ = ["main"]
