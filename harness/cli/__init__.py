"""`harness`, the command line of the project: one module a group of commands."""

from harness.cli.app import main

__all__ = ["main"]
