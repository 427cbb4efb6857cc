"""Folders of Hugging Face weights that are damaged or not what they seem."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.errors import FormatError
from harness.megatron.hf_files import INDEX_FILE, HfWeights

MAPS = ("[]", "null", '{"a": 3}', '{"a": "/b"}')


@pytest.mark.parametrize("index", ["[]", "[" * 100_000, *(f'{{"weight_map": {files}}}' for files in MAPS)])
def test_a_damaged_index_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(FormatError, match=f"the weights cannot be read: {INDEX_FILE} is damaged: "):
        HfWeights(tmp_path)


def test_blocks_without_scales_of_their_shape_are_no_quantized_tensor(tmp_path: Path) -> None:
    blocks, scales = torch.zeros(2, 32, 1, 16, dtype=torch.uint8), torch.full((2, 32, 1), 127, dtype=torch.uint8)
    odd = {"a_blocks": blocks, "b_blocks": blocks[0], "b_scales": scales[0], "c_blocks": blocks, "c_scales": scales[1:]}
    odd |= {"e_blocks": blocks.half(), "e_scales": scales, "f_blocks": blocks, "f_scales": scales.half()}
    stored = {**odd, "d_blocks": blocks, "d_scales": scales}
    save_file({name: tensor.clone() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    with HfWeights(tmp_path) as weights:
        assert weights.names == {*odd, "d"}
        assert weights.shape("d") == weights.rows("d").shape == (2, 32, 32)


@pytest.mark.parametrize("shapes", [((4, 6, 8), (3, 8, 3)), ((4, 7, 8), (4, 8, 3)), ((4, 8, 7), (4, 3, 8))])
def test_stacks_of_experts_that_do_not_fit_each_other_are_not_divided(tmp_path: Path, shapes) -> None:
    layer = "model.layers.0.mlp.experts."
    stored = {
        layer + name: torch.zeros(shape) for name, shape in zip(("gate_up_proj", "down_proj"), shapes, strict=True)
    }
    save_file(stored, tmp_path / "model.safetensors")
    with HfWeights(tmp_path) as weights:
        assert weights.names == set(stored)
