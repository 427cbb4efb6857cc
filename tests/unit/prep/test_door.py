"""The door of the package: every public name can be imported, and cheap names import no heavy library."""

from __future__ import annotations

import subprocess
import sys

import harness.prep


def loaded_modules(code: str, *names: str) -> set[str]:
    """Those of `names` that are imported after running `code` in a fresh process."""
    script = f"import sys\n{code}\nprint(*sorted({set(names)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_every_public_name_can_be_imported():
    assert all(getattr(harness.prep, name) is not None for name in harness.prep.__all__)


def test_a_tokenizer_or_a_plan_imports_no_pyarrow_and_no_tokenizer_library():
    code = "from harness.prep import ChatTokenizer, plan_packs; from harness.prep.chat import parse_record"
    assert loaded_modules(code, "pyarrow", "rich", "tokenizers", "transformers", "torch", "hydra") == set()


def test_preparing_imports_no_torch_and_no_hydra():
    code = "from harness.prep import PrepareConfig, prepare; from harness.prep.pipeline import repack_store"
    assert loaded_modules(code, "torch", "megatron", "hydra", "omegaconf", "transformers", "ray") == set()
