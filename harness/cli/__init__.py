"""`harness`, the command line of the project: one module a group of commands."""

from harness.errors import exit_on_error

__all__ = ["main"]


def main() -> None:
    """Run the command; an installation without the extra `cli` gets an error that names it."""
    with exit_on_error(reads_input=True):
        from harness.cli.app import main as run
    run()
