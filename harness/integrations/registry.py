"""The trainers that can take the data path, and the packages that each needs."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from types import MappingProxyType

from harness.errors import ConfigError


@dataclass(frozen=True)
class Integration:
    """One trainer.

    Attributes:
        packages: modules that it imports.
        install: command that installs them.
    """

    packages: tuple[str, ...]
    install: str


_HUGGING_FACE, _MEGATRON = ("torch", "transformers", "accelerate"), ("torch", "megatron.core")
INTEGRATIONS = MappingProxyType(
    {
        "torch": Integration(("torch",), "pip install torch"),
        "torchdata": Integration(("torch", "torchdata"), "pip install torchdata"),
        "accelerate": Integration(("torch", "accelerate"), "pip install accelerate"),
        "lightning": Integration(("torch", "lightning"), "pip install lightning"),
        "huggingface": Integration(_HUGGING_FACE, "pip install torch 'transformers>=4.53' accelerate"),
        "trl": Integration((*_HUGGING_FACE, "datasets", "trl"), "pip install trl"),
        "megatron_lm": Integration(
            (*_MEGATRON, "megatron.training"), "pip install 'megatron-core>=0.19' (Python 3.12 or later)"
        ),
        "megatron_bridge": Integration((*_MEGATRON, "megatron.bridge"), "pip install 'megatron-bridge>=0.6'"),
        "torchtitan": Integration(("torch", "torchtitan"), "pip install torchtitan"),
    }
)


def missing_packages(name: str) -> list[str]:
    """Return the packages of an integration that are not installed; nothing is imported but their parents."""
    return [package for package in INTEGRATIONS[name].packages if not _is_installed(package)]


def require(name: str) -> None:
    """Raise ConfigError with the command that installs what an integration misses."""
    if missing := missing_packages(name):
        what = f"the integration {name} requires {' and '.join(missing)} (not installed)"
        raise ConfigError(what, where=sys.executable, fix=INTEGRATIONS[name].install)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # of the parent; of a module without a spec
        return False
