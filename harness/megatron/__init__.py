"""Everything that touches torch.distributed, Megatron-Core or Transformer Engine."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

# On import Megatron-Core warns a dozen times about optional packages (Apex, flash-attention) that nothing here needs.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.core")
# Its checkpoints use parts of PyTorch that warn at each load, from wherever the call was made.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, message="Please use DTensor instead")


@contextmanager
def _not_collecting() -> Iterator[None]:
    """Around imports: what they make stays, and looking for garbage among it takes a quarter of their time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


with _not_collecting():
    if torch.version.cuda is None:
        # Megatron-Core gives its fused functions to torch.compile as it is imported, which loads the compiler: a second
        # or two of every start. On a CPU nothing here calls them, and they run as they are written.
        with mock.patch.object(torch, "compile", lambda function, **options: function):
            import megatron.core
    else:
        import megatron.core  # noqa: F401
