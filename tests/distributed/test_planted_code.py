"""Code that somebody planted in a checkpoint or a model does not run when it is loaded, and its file is named."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from harness.errors import CheckpointError, HarnessError
from harness.megatron import compat
from harness.megatron.export.folder import export_checkpoint
from harness.plan import SftConfig
from harness.recipes import sft
from harness.storage.checksums import CHECKSUMS_FILE, digest_files, write_checksums
from harness.train.checkpoints import CHECKPOINTS

from .conftest import overrides_of, run_here

SETTINGS = ("trainer.checkpoint_interval=2", "trainer.eval_interval=0")


class Planted:
    """An object that creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted") / "run"
    run_here(sft, SftConfig, overrides_of(dataset, folder, *SETTINGS, "trainer.steps=2"))
    return folder


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _metadata(checkpoint: Path) -> Metadata:
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def _replace_item(checkpoint: Path, kind: type, payload: bytes, key: str = "") -> None:
    """Append a payload to a file, and let `.metadata` name it as the content of every item of a kind.

    Objects are those that this version of Megatron-Core has, and an extra state as older checkpoints have it.
    """
    metadata = _metadata(checkpoint)
    if kind is BytesStorageMetadata:
        extra = "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_4"
        metadata.state_dict_metadata[extra] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(extra)] = next(iter(metadata.storage_data.values()))
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], kind) and key in index.fqn:
            with (checkpoint / "__0_0.distcp").open("ab") as file:
                offset = file.tell()
                file.write(payload)
            place = replace(info, relative_path="__0_0.distcp", offset=offset, length=len(payload))
            metadata.storage_data[index] = place
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def plant_in_metadata(checkpoint: Path, marker: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Planted(marker)))


def plant_inside_metadata(checkpoint: Path, marker: Path) -> None:
    metadata = _metadata(checkpoint)
    metadata.planner_data = {"more": Planted(marker)}
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def plant_in_common(checkpoint: Path, marker: Path) -> None:
    torch.save({"optimizer_steps": Planted(marker)}, checkpoint / "common.pt")


def plant_in_objects(checkpoint: Path, marker: Path) -> None:
    _replace_item(checkpoint, BytesStorageMetadata, _saved([Planted(marker)]))


def plant_in_tensors(checkpoint: Path, marker: Path) -> None:
    _replace_item(checkpoint, TensorStorageMetadata, _saved(Planted(marker)))


def plant_in_extra_state(checkpoint: Path, marker: Path) -> None:
    """Bytes that Transformer Engine would unpickle."""
    state = torch.frombuffer(bytearray(pickle.dumps(Planted(marker))), dtype=torch.uint8)
    _replace_item(checkpoint, BytesStorageMetadata, _saved([state]), key="_extra_state")


# The file that a refusal names; None for what is never read.
PLANTS = [
    (plant_in_metadata, ".metadata"),
    (plant_inside_metadata, ".metadata"),
    (plant_in_common, "common.pt"),
    (plant_in_objects, None if compat.COMMON_VALUES_HAVE_A_FILE else "__0_0.distcp"),
    (plant_in_tensors, "__0_0.distcp"),
    (plant_in_extra_state, None),
]


def refused(action: Callable[[], object], name: str) -> HarnessError:
    with pytest.raises(HarnessError) as error:
        action()
    assert name in error.value.what
    return error.value


@pytest.mark.submission
@pytest.mark.parametrize(("plant", "name"), PLANTS, ids=lambda value: getattr(value, "__name__", None))
def test_export_and_resume_run_no_planted_code(run: Path, dataset: Path, tmp_path: Path, plant, name) -> None:
    folder, model = shutil.copytree(run, tmp_path / "run"), tmp_path / "model"
    checkpoint = folder / CHECKPOINTS / "step-00000002"
    plant(checkpoint, tmp_path / "marker")
    # With hashes that fit: nothing else names the file.
    names = [path.name for path in checkpoint.iterdir() if path.name != CHECKSUMS_FILE]
    write_checksums(checkpoint, digest_files(checkpoint, names))

    def resume() -> None:
        run_here(sft, SftConfig, overrides_of(dataset, folder, *SETTINGS, "trainer.steps=3", "resume=true"))

    if name is None:
        export_checkpoint(folder, model)
        resume()
    else:
        refused(lambda: export_checkpoint(folder, model), name)
        assert not model.exists()
        assert isinstance(refused(resume, name), CheckpointError)
    assert not (tmp_path / "marker").exists()


@pytest.mark.submission
@pytest.mark.parametrize("part", ["weights", "common.pt"])
def test_a_checkpoint_without_checksums_is_used_when_asked_for_unless_a_bit_of_a_tensor_differs(
    run: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    folder, ask = shutil.copytree(run, tmp_path / "run"), "resume_unchecked=true"
    checkpoint = folder / CHECKPOINTS / "step-00000002"

    def resume(*settings: str) -> None:
        run_here(sft, SftConfig, overrides_of(dataset, folder, *SETTINGS, "trainer.steps=3", "resume=true", *settings))

    export_checkpoint(folder, tmp_path / "checked", unchecked=True)
    (checkpoint / CHECKSUMS_FILE).unlink()
    for use in (resume, lambda: export_checkpoint(folder, tmp_path / "never")):
        error = refused(use, "checksums.json is missing")
        assert ask in error.fix
        assert "harness export --unchecked" in error.fix
    assert "unchecked" not in capsys.readouterr().err

    export_checkpoint(checkpoint, tmp_path / "model", unchecked=True)
    assert (tmp_path / "model/model.safetensors").read_bytes() == (tmp_path / "checked/model.safetensors").read_bytes()
    warned = "unchecked: damage to .metadata and run.json is not detected without checksums.json\n  where: "
    assert f"{warned}{checkpoint}\n" in capsys.readouterr().err

    if part == "weights":
        places = _metadata(checkpoint).storage_data.items()
        stored = next(info for index, info in places if index.fqn == "embedding.word_embeddings.weight")
        name, at = stored.relative_path, stored.offset + stored.length // 2
    else:
        name = part if compat.COMMON_VALUES_HAVE_A_FILE else ".metadata"
        at = (checkpoint / name).read_bytes().index(b"lr") if name == part else 0
    data = bytearray((checkpoint / name).read_bytes())
    data[at] ^= 1
    (checkpoint / name).write_bytes(data)
    for use in (lambda: resume(ask), lambda: export_checkpoint(folder, tmp_path / "never", unchecked=True)):
        refused(use, name)
    data[at] ^= 1
    (checkpoint / name).write_bytes(data)
    resume(ask)
    assert (folder / CHECKPOINTS / "step-00000003" / CHECKSUMS_FILE).is_file()


def test_planted_code_runs_where_nothing_refuses_it(tmp_path: Path) -> None:
    """The attack of this file is a real one."""
    pickle.loads(pickle.dumps(Planted(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


def a_model(folder: Path, marker: Path) -> Path:
    """Write a folder of a model whose code and weights have planted code."""
    folder.mkdir()
    config = {"architectures": ["Llama"], "auto_map": dict.fromkeys(("AutoConfig", "AutoTokenizer"), "planted.Llama")}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "planted"}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "planted.py").write_text(f"open({str(marker)!r}, 'w')\n")
    torch.save({"model.norm.weight": Planted(marker)}, folder / "pytorch_model.bin")
    return folder


def test_initial_weights_are_safetensors_or_nothing(dataset: Path, tmp_path: Path) -> None:
    folder = a_model(tmp_path / "model", tmp_path / "marker")
    settings = overrides_of(dataset, tmp_path / "run", "trainer.steps=1", f"model.init_from={folder}")
    with pytest.raises(HarnessError):
        run_here(sft, SftConfig, settings)
    assert not (tmp_path / "marker").exists()
