"""`harness`, the command line of the project: one module a group of commands."""

from __future__ import annotations

import sys

from harness.errors import exit_on_error
from harness.printing import UNREAD

__all__ = ["main"]
# Commands with an argument or a mode that reads standard input.
_READING = frozenset(("chat", "live", "preflight"))


def main() -> None:
    """Run the command line; a HarnessError, and a missing extra, become a message and exit code 2."""
    with exit_on_error(reads_input=bool(_READING.intersection(sys.argv[1:2]))):
        from harness.cli.app import USAGE_ERROR, app, usage_error

        try:
            code = app(prog_name="harness", standalone_mode=False)
        except USAGE_ERROR as error:
            raise usage_error(error) from None
        except SystemExit as ended:
            # Typer ends with 1 where the reader of the help has ended.
            if isinstance(ended.__context__, BrokenPipeError):
                sys.exit(UNREAD)
            raise
        sys.exit(code)
