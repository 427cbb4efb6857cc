"""Build step that pyproject.toml cannot express: a wheel carries configs/ and recipes/ inside the package harness."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CONFIGS = Path(__file__).resolve().parent / "configs"
RECIPES = CONFIGS.parent / "recipes"


class BuildWithConfigs(build_py):
    """Put configs/ and recipes/ into the folder harness of a wheel; an editable install reads those of the checkout."""

    def run(self) -> None:
        if not self.editable_mode:
            # An earlier build in the same checkout leaves modules that have been moved since.
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            build = Path(self.build_lib)
            shutil.copytree(CONFIGS, build / "harness" / "configs", dirs_exist_ok=True)
            for recipe in sorted(RECIPES.glob("*.py")):
                # The package in the wheel has an `__init__` of its own, which finds the recipes of a checkout.
                if recipe.name != "__init__.py":
                    shutil.copy2(recipe, build / "harness" / "recipes")


setup(cmdclass={"build_py": BuildWithConfigs})
