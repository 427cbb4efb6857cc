"""`python -m harness.cli` is the command `harness`."""

from harness.cli import main

main()
