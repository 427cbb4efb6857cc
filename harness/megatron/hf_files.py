"""The safetensors files of a folder of Hugging Face weights, read in parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harness.errors import FormatError

INDEX_FILE, _WHOLE_FILE = "model.safetensors.index.json", "model.safetensors"
# Suffixes of the names of tensors that are quantized to MXFP4; `_FP4` lists its numbers, without signs.
_BLOCKS, _SCALES = "_blocks", "_scales"
# Stacked weights of all experts in a layer, gate before up; with biases (gpt-oss) they are stacked differently.
_GATES, _DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"
_FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


class _Stored(NamedTuple):
    """A tensor in a file, or, if `expert` is set, some rows of one of its experts.

    If `is_turned`, these rows are columns in the file.
    """

    file: Any
    name: str
    expert: int | None = None
    first: int = 0
    rows: int = 0
    is_turned: bool = False

    def read(self, start: int, stop: int | None, columns: slice = slice(None)) -> torch.Tensor:
        whole = self.file.get_slice(self.name)
        if self.expert is not None:
            rows = slice(self.first + start, self.first + (self.rows if stop is None else stop))
            part: torch.Tensor = (
                whole[self.expert, columns, rows].t() if self.is_turned else whole[self.expert, rows, columns]
            )
        else:
            rows = slice(start, whole.get_shape()[0] if stop is None else stop)
            part = whole[rows] if columns == slice(None) else whole[rows, columns]
        return part


class HfWeights(ExitStack):
    """Context manager for the safetensors files of a folder, mapped into memory.

    Tensors are named as in a text model with separate experts, whatever their names in the files. Raises FormatError if
    the folder has no such files, or one cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        super().__init__()
        self.folder = folder
        self.stored_name: Callable[[str], str] = lambda name: name
        self._files: dict[str, _Stored] = {}
        self._quantized: set[str] = set()
        try:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
            for name in _indexed_files(folder) if (folder / INDEX_FILE).is_file() else names:
                file = self.enter_context(safe_open(folder / name, framework="pt"))
                for own in file.keys():  # noqa: SIM118
                    part, stored = _name_of_part(own), _Stored(file, own)
                    if self._files.setdefault(part, stored) is not stored:
                        raise ValueError(f"{name} contains a duplicate of {part}")
            self._divide_experts()
            for name in [name.removesuffix(_BLOCKS) for name in self._files if name.endswith(_BLOCKS)]:
                both = [self._files[name + end] for end in (_BLOCKS, _SCALES) if name + end in self._files]
                slices = [one.file.get_slice(one.name) for one in both]
                shapes = [one.get_shape() for one in slices if one.get_dtype() == "U8"]
                if len(shapes) == 2 and len(shapes[1]) == 3 and shapes[0] == [*shapes[1], 16]:
                    self._quantized.add(name)
        except (OSError, ValueError, SafetensorError) as error:
            self.close()
            what = f"the weights cannot be read: {error}"
            raise FormatError(what, where=str(folder), fix="download or export the model again") from None
        # Older files store values that are computed from the settings.
        own = {name for name in self._files if not name.endswith("rotary_emb.inv_freq")}
        halves = {name + end for name in self._quantized for end in (_BLOCKS, _SCALES)}
        self.names = (own - halves) | self._quantized
        if not self._files:
            fix = "write them with save_pretrained(..., safe_serialization=True)"
            raise FormatError("the folder contains no *.safetensors", where=str(folder), fix=fix)

    def _divide_experts(self) -> None:
        for name in [name for name in self._files if name.endswith(_GATES) and f"{name}_bias" not in self._files]:
            layer = name.removesuffix(_GATES)
            shapes = [self.shape(part) for part in (name, layer + _DOWN) if part in self._files]
            if [len(shape) for shape in shapes] != [3, 3]:
                continue
            (experts, both, _), (others, hidden, _) = shapes
            # In files of qwen3_vl_moe, the inputs of an expert are the first dimension.
            if is_turned := shapes[0][1] == shapes[1][2]:
                both, hidden = shapes[0][2], shapes[1][2]
            if others != experts or both % 2:
                continue
            gates, down = self._files.pop(name), self._files.pop(layer + _DOWN)
            parts = ("gate", gates, 0, both // 2), ("up", gates, both // 2, both // 2), ("down", down, 0, hidden)
            for number in range(experts):
                for part, of, first, rows in parts:
                    stored = _Stored(of.file, of.name, number, first, rows, is_turned)
                    self._files[f"{layer}.mlp.experts.{number}.{part}_proj.weight"] = stored

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._quantized:
            experts, outputs, groups, half = self.shape(name + _BLOCKS)
            return experts, groups * half * 2, outputs
        stored = self._files[self.stored_name(name)]
        shape = tuple(stored.file.get_slice(stored.name).get_shape())
        return shape if stored.expert is None else (stored.rows, shape[1 if stored.is_turned else 2])

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        if name in self._quantized:
            return _from_mxfp4(self.rows(name + _BLOCKS, start, stop), self.rows(name + _SCALES, start, stop))
        return self._files[self.stored_name(name)].read(start, stop)

    def columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._files[self.stored_name(name)].read(0, None, slice(start, stop))


def _name_of_part(name: str) -> str:
    """Return the name of a tensor of a multimodal model within its text model or its encoder."""
    name = name.removeprefix("thinker.").replace("vision_tower.vision_model.", "vision_tower.", 1)
    if name.startswith(("model.vision_tower.", "model.multi_modal_projector.")):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "model.", 1).removeprefix("language_model.")


def _indexed_files(folder: Path) -> list[str]:
    try:
        names = sorted(set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values()))
        if outside := next((name for name in names if Path(name).name != name), None):
            raise ValueError(f"{outside!r} is not a file in the folder")
        if _WHOLE_FILE not in names and (folder / _WHOLE_FILE).is_file():
            raise ValueError(f"{_WHOLE_FILE} holds a different model than the files that it lists: remove one of them")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{INDEX_FILE} is damaged: {error}") from None
    return names


def _from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Convert 4-bit matrices, with a power-of-two scale for each 32 numbers, to bfloat16 [experts, inputs, outputs].

    Args:
        blocks: uint8 [experts, outputs, inputs / 32, 16], two numbers per byte, the first in the low bits.
        scales: uint8 [experts, outputs, inputs / 32], exponents; 127 means a scale of 1.

    Source: OCP Microscaling Formats (MX) Specification, 2023.
    """
    values = torch.tensor(_FP4 + [-value for value in _FP4], dtype=torch.bfloat16)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    numbers = torch.ldexp(values[pairs.int()], scales.int().unsqueeze(-1) - 127)
    return numbers.flatten(-2).transpose(1, 2)
