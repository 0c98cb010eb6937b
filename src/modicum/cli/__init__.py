"""The command line: one thin module a verb; argument, call, print. Nothing here computes.

Exit status: 0 done, 2 the user's to mend, 1 ours, 130 interrupted, 143 ended by SIGTERM (training saves first, and ends
with 130 after either), 141 its output is read no more.
"""

from modicum.cli.app import main

__all__ = ["main"]
