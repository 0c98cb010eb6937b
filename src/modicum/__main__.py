"""`python -m modicum` is the same as `modicum`."""

from modicum.cli import main

main()
