"""`-m tests.distributed.user_buffers FILE`: layers and buffers of tensor-parallel exchanges, as one rank of a job.

With the stub of Transformer Engine its function that makes the buffers is recorded, with those of a wheel the classes
of its extension are.
"""

from __future__ import annotations

import enum
import inspect
import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from harness.megatron import prepare_process

prepare_process()

import torch  # noqa: E402
import transformer_engine.pytorch as engine  # noqa: E402
from transformer_engine.pytorch.module import base  # noqa: E402

from harness.errors import ConfigError  # noqa: E402
from harness.megatron.job import runtime  # noqa: E402
from harness.megatron.job.runtime import join  # noqa: E402
from harness.megatron.step import MegatronStep  # noqa: E402
from harness.megatron.unproven import user_buffers  # noqa: E402
from harness.plan import ModelConfig, ParallelConfig  # noqa: E402

MODEL = ModelConfig(num_layers=1, hidden_size=64, ffn_hidden_size=128, dtype="bfloat16", attention="transformer_engine")
PARALLEL = ParallelConfig(
    tensor_parallel_size=2, sequence_parallel=True, static_rows=True, overlap_tensor_parallel=True
)


def of_stub(made: list[Any], stack: ExitStack) -> None:
    def initialize_ub(
        shape: list[int],
        tp_size: int,
        use_fp8: bool = False,
        quantization_modes: Any = None,
        dtype: Any = None,
        ub_cfgs: Any = None,
        bootstrap_backend: str = "",
    ) -> None:
        made.append([shape, str(dtype), tp_size, [mode.name for mode in quantization_modes], use_fp8])

    modes = enum.Enum("Modes", ["NONE", "FP8"])
    values = {"initialize_ub": initialize_ub, "_ub_communicators": None, "UserBufferQuantizationMode": modes}
    stack.enter_context(mock.patch.multiple(base, create=True, **values))


def of_wheel(made: list[Any], stack: ExitStack) -> None:
    def communicator(shape: list[int], dtype: Any, helper: Any, tp_size: int, *_: Any, **options: Any) -> Any:
        made.append([shape, str(dtype), tp_size, options.get("atomic_gemm")])
        return mock.MagicMock()

    values = {
        "device_supports_multicast": lambda: True,
        "ubuf_built_with_mpi": lambda: False,
        "get_stream_priority_range": lambda: (0, -1),
        "CommOverlapHelper": mock.MagicMock(),
        "CommOverlapP2P": communicator,
        "CommOverlap": communicator,
    }
    stack.enter_context(mock.patch.multiple(base.tex, create=True, **values))
    stack.enter_context(mock.patch.object(base, "get_workspace", return_value=torch.empty(1), create=True))


def main(file: Path) -> None:
    is_stub = not inspect.isfunction(getattr(engine.Linear, "reset_parameters", None))
    made: list[Any] = []
    found: dict[str, Any] = {}
    # A wheel makes groups of ranks where there are several tensor-parallel ones, which a rank alone cannot.
    parallel = replace(PARALLEL, context_parallel_size=2 if is_stub else 1)
    with runtime.alone(1, parallel.model_ranks) as job, ExitStack() as stack:
        layout = join(parallel, parallel.model_ranks)

        def build() -> MegatronStep:
            return MegatronStep(MODEL, parallel, layout, device=job.device, vocab_size=128, pad_rows_to=48)

        def refused(**variables: str) -> str:
            with mock.patch.dict("os.environ", variables):
                try:
                    build()
                except ConfigError as error:
                    return str(error)
            return ""

        (of_stub if is_stub else of_wheel)(made, stack)
        # The layers of a wheel refuse to be made without a GPU.
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=True))
        found["on a cpu"] = refused()
        stack.enter_context(mock.patch.object(user_buffers, "has_streams", return_value=True))
        found["on two nodes"] = refused(LOCAL_WORLD_SIZE="1")
        found["made before"] = len(made)
        build()
        step = build()  # those of the first are given back
        found["made"] = made
        layer = step.chunks[0].module.decoder.layers[0]
        for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"):
            linear = layer.get_submodule(name)
            overlaps = {key: value for key, value in vars(linear).items() if key.startswith("ub_") and value is True}
            found[linear.ub_name] = sorted(linear.overlaps if is_stub else overlaps)
        if is_stub:
            base.initialize_ub = lambda shape, tp_size, use_fp8, **_: made.append(use_fp8)  # of 2.5
            build()
            found["older"] = made.pop()
            base.initialize_ub = mock.Mock(side_effect=AssertionError("no\nCUDA Multicast"), __signature__=None)
            with mock.patch.object(user_buffers, "accepts", return_value=False):
                found["without multicast"] = refused()
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
