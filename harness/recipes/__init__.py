"""The recipes by the name that they have everywhere: `python -m harness.recipes.sft`.

A wheel carries them in this folder, so that it installs no package `recipes` next to other projects'; a checkout keeps
them in its folder `recipes`.
"""

from importlib import import_module
from pathlib import Path

from harness.errors import exit_on_error

_HERE = Path(__file__).resolve().parent
__path__ = [str(_HERE if (_HERE / "sft.py").is_file() else _HERE.parents[1] / "recipes")]

# Before a recipe imports it, which would end in a traceback.
try:
    import_module("hydra")
except ModuleNotFoundError:
    with exit_on_error():
        raise
