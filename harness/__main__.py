"""`python -m harness` is the command `harness`."""

from harness.cli import main

main()
