"""Build step that pyproject.toml cannot express: a wheel carries the folder configs/ inside the package harness."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CONFIGS = Path(__file__).resolve().parent / "configs"


class BuildWithConfigs(build_py):
    """Copy configs/ to harness/configs of a wheel; an editable install reads the folder of the checkout."""

    def run(self) -> None:
        if not self.editable_mode:
            # An earlier build in the same checkout leaves modules that have been moved since.
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            shutil.copytree(CONFIGS, Path(self.build_lib) / "harness" / "configs", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConfigs})
