"""``python -m recexp``: the command line."""

from recexp.cli import main

main()
