"""Attention that Transformer Engine chooses for each experiment on an H100, asked on a machine without a GPU.

    python tests/samples/engine_backends.py make 2.14.1     # install a version outside the checkout: 1 GB
    python tests/samples/engine_backends.py write 2.14.1    # ask it, and write its row of the golden table
    python tests/samples/engine_backends.py build 2.20.2    # install it, and build its extension: needs nvcc 13

Versions lie in `$VERSIONS_DIR`, by default `~/.cache/megatron-sft-harness`, beside the environment of `make
test-versions`, whose PyTorch and libraries of NVIDIA they use.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from harness.config import CONFIGS, compose_config
from harness.plan.settings import SftConfig

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden/attention_backends.json"
EXPERIMENTS = sorted(file.stem for file in (CONFIGS / "experiment").glob("*node*.yaml"))
_COMPILE = ("cc", "-shared", "-fPIC")
# Needed to import it.
_BESIDE = ("einops", "onnx", "onnxscript", "onnx_ir", "ml_dtypes")


def question(config: SftConfig) -> dict[str, Any] | None:
    """Return the parameters of an experiment's attention, under Transformer Engine's names; None if it is PyTorch's.

    They are those of a row of eight sequences, one of which may be as long as the row; where ranks share rows, as long
    as the model's longest.
    """
    model, parallel = config.model.on("cuda"), config.parallel
    if model.traits.has_sinks:
        return None
    tp, cp = parallel.tensor_parallel_size, parallel.context_parallel_size
    if config.shares_rows:
        cp = model.max_sequence_length // config.schedule.max_tokens_per_rank
    is_latent = bool(model.kv_lora_rank)
    tokens = config.schedule.max_tokens_per_rank * cp
    return {
        "qkv_dtype": model.dtype,
        "qkv_layout": "thd_thd_thd",
        "batch_size": 8,
        "num_heads": model.num_attention_heads // tp,
        "num_gqa_groups": (model.num_attention_heads if is_latent else model.num_query_groups) // tp,
        "max_seqlen_q": tokens,
        "max_seqlen_kv": tokens,
        "num_tokens_q": tokens,
        "num_tokens_kv": tokens,
        "head_dim_qk": model.qk_nope_head_dim + model.qk_rope_head_dim if is_latent else model.head_size,
        "head_dim_v": model.v_head_dim if is_latent else model.head_size,
        "attn_mask_type": "padding_causal",
        "window_size": [-1 if model.sliding_window is None else model.sliding_window - 1, 0],
        "bottom_right_diagonal": False,
        "core_attention_bias_shape": None,
        "core_attention_bias_requires_grad": False,
        "pad_between_seqs": cp > 1 or parallel.padding_setting is not None,
        "context_parallel": cp > 1,
        "cp_comm_type": "p2p",
        "cp_size": cp,
        "deterministic": False,
        "is_training": True,
    }


def folder(version: str) -> Path:
    """Return where a version is installed, which need not exist."""
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-sft-harness"
    return Path(os.environ.get("VERSIONS_DIR") or cache_folder) / f"transformer-engine-{version}"


def is_made(version: str) -> bool:
    return (folder(version) / "installed").is_file()


@cache
def python() -> str:
    """Return the interpreter of the environment of `make test-versions`, which is made if it is missing."""
    return subprocess.run([HERE.parents[1] / ".ci/versions"], check=True, capture_output=True, text=True).stdout.strip()


def make(version: str) -> None:
    """Install a version and what it imports, without what they need: PyTorch and NVIDIA's libraries are there."""
    target = folder(version)
    shutil.rmtree(target, ignore_errors=True)
    packages = [f"transformer_engine=={version}", f"transformer_engine_cu13=={version}", *_BESIDE]
    pip = [python(), "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", target]
    subprocess.run([*pip, *packages], check=True)
    (target / "installed").touch()  # last, so that an interrupted installation starts again


def is_built(version: str) -> bool:
    return (folder(version) / "built").is_file()


def build(version: str) -> None:
    """Install a version and build its extension, by which PyTorch calls its library: 20 minutes of a core's time."""
    if not is_made(version):
        make(version)
    target = folder(version)
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")).resolve()  # nvcc may be a wrapper elsewhere
    if not (toolkit / "bin/nvcc").exists():
        sys.exit(f"there is no nvcc in {toolkit}/bin: install the CUDA toolkit, or name it with CUDA_HOME=...")
    with tempfile.TemporaryDirectory() as place:
        tools, result = Path(place, "tools"), Path(place, "result")
        pip = [python(), "-m", "pip", "install", "--quiet", "--no-compile", "--target"]
        subprocess.run([*pip, tools, "setuptools", "wheel", "ninja", "packaging", "pydantic"], check=True)
        purelib = [python(), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        libraries = Path(subprocess.run(purelib, check=True, capture_output=True, text=True).stdout.strip(), "nvidia")
        # The toolkit may lack headers of the other libraries, which come with PyTorch.
        headers = [libraries / name / "include" for name in ("cu13", "cudnn", "nccl")]
        environment = os.environ | {
            "PATH": os.pathsep.join([f"{tools}/bin", str(Path(python()).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(tools), str(target)]),
            "NVTE_FRAMEWORK": "pytorch",
            "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # instead of a download
            "CUDA_HOME": str(toolkit),
            "TORCH_CUDA_ARCH_LIST": "9.0",
            "CPATH": os.pathsep.join(map(str, headers)),
            "LIBRARY_PATH": str(libraries / "cu13/lib"),
        }
        options = ["--no-build-isolation", "--no-deps", f"transformer_engine_torch=={version}"]
        subprocess.run([*pip, result, *options], env=environment, check=True)
        shutil.copytree(result, target, dirs_exist_ok=True)
    (target / "built").touch()


def compile_gpu(place: Path) -> Path:
    """Compile `engine_gpu.c` into a folder."""
    subprocess.run([*_COMPILE, "-o", place / "gpu.so", HERE / "engine_gpu.c", "-ldl"], check=True)
    return place / "gpu.so"


def ask(version: str, questions: dict[str, Any], program: str = "engine_question.py") -> dict[str, Any]:
    """Return what a version chooses for each question, and the version of cuDNN that it was asked with.

    By name of the question and case, `flash`, `fused`, `unfused` or `none`: as it is (`plain`), with
    `trainer.deterministic=true`, and both `with flash-attn` installed. Other programs have other questions.
    """
    with tempfile.TemporaryDirectory() as place:
        gpu = compile_gpu(Path(place))
        # Newer versions ask for the driver's library by name, and call it through the runtime only.
        driver = [*_COMPILE, "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o", f"{place}/libcuda.so.1"]
        subprocess.run(driver, check=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
        environment |= {
            "LD_PRELOAD": str(gpu),
            "ENGINE_OPENER": str(gpu),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (place, os.environ.get("LD_LIBRARY_PATH")))),
            "PYTHONPATH": str(folder(version)),
        }
        done = subprocess.run(
            [python(), HERE / program],
            input=json.dumps(questions),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, f"{version}: {done.stderr}"
    found = json.loads(done.stdout)
    assert found.pop("version").partition("+")[0] == version
    return found


def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


def _write(versions: list[str]) -> None:
    """Ask these versions again; rows of others stay unless an experiment asks for something else now."""
    asked = {name: question(compose_config("sft", SftConfig, [f"experiment={name}"])) for name in EXPERIMENTS}
    table = golden()["versions"] if GOLDEN.exists() and golden()["questions"] == asked else {}
    for version in versions:
        table[version] = ask(version, {name: one for name, one in asked.items() if one is not None})
        ordered = sorted(table, key=lambda one: [int(part) for part in one.split(".")])
        found = {"questions": asked, "versions": {one: table[one] for one in ordered}}
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
        print(version, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"]:
        for one in sys.argv[2:]:
            make(one)
            print(f"{one}: {folder(one)}", flush=True)
    elif sys.argv[1:2] == ["build"]:
        for one in sys.argv[2:]:
            build(one)
            print(f"{one}: {folder(one)}", flush=True)
    elif sys.argv[1:2] == ["write"]:
        _write(sys.argv[2:])
    else:
        sys.exit(__doc__)
