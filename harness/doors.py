"""Doors whose names load on first use, for packages with modules that need extras or take long to import."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from harness.errors import how_to_install


def names_on_first_use(package: str, **modules: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package (PEP 562) that imports a name from its module when it is first used.

    `modules` has the names of each module of the package, separated by spaces.
    """
    places = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{package}.{places[name]}"), name)
        except ModuleNotFoundError as error:
            if fix := how_to_install(error):
                error.add_note(fix)
            raise

    return load
