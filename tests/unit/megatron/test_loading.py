"""The pickle of a checkpoint's metadata: torch's own classes pass, everything else is refused and changes nothing."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from harness.errors import CheckpointError
from harness.megatron.state.loading import _CheckedObjects, read_metadata

FOLDER = Path("/checkpoint")


def metadata(file: str = "__0_0.distcp") -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    weight = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([4]), [chunk])
    stored = {MetadataIndex("w", torch.Size([0])): _StorageInfo(file, 0, 10)}
    return Metadata({"w": weight, "state": BytesStorageMetadata()}, storage_data=stored)


def read(data: bytes) -> Metadata:
    return read_metadata(io.BytesIO(data), FOLDER)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_as_torch_writes_it_is_read_back(protocol: int) -> None:
    assert read(pickle.dumps(metadata(), protocol)) == metadata()


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cposix\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"\x80\x04\x8c\x05torch\x8c\tos.system\x93\x8c\x04true\x85R.",
        pickle.dumps(os.getcwd),
    ],
)
def test_every_other_name_is_refused_with_the_file(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged or contains more than .* requests ") as error:
        read(data)
    assert error.value.where == "/checkpoint"


def test_a_pickle_cannot_change_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    # BUILD with the state (None, {"evil": 1}) sets an attribute of whatever is below it on the stack.
    with pytest.raises(CheckpointError, match="it changes"):
        read(b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(S'evil'\nI1\ndtb.")
    assert not hasattr(Metadata, "evil")


@pytest.mark.parametrize("file", ["../other/__0_0.distcp", "/etc/passwd", "a/b"])
def test_files_outside_the_checkpoint_are_refused(file: str) -> None:
    with pytest.raises(CheckpointError, match="not a file of the checkpoint"):
        read(pickle.dumps(metadata(file)))


@pytest.mark.parametrize("data", [b"", b"\x80", pickle.dumps(metadata())[:-20], pickle.dumps({"w": 1})])
def test_damaged_metadata_is_a_named_error(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"file \.metadata"):
        read(data)


def load_object(name: str, value: Any) -> list[bytes]:
    """Return what reaches Megatron of an object of a checkpoint."""
    saved, passed = io.BytesIO(), []
    torch.save(value, saved)
    planner = SimpleNamespace(load_bytes=lambda item, file: passed.append(file.read()))
    item: Any = SimpleNamespace(storage_index="s", dest_index=SimpleNamespace(fqn=name))
    storage = {"s": SimpleNamespace(relative_path="__0_0.distcp")}
    saved.seek(0)
    _CheckedObjects(planner, FOLDER, storage).load_bytes(item, saved)
    assert passed == [saved.getvalue()]
    return passed


def test_a_state_that_transformer_engine_would_unpickle_is_refused_and_an_empty_one_passes() -> None:
    pickled = torch.tensor(list(pickle.dumps({"scale": 1})), dtype=torch.uint8)
    for empty in ([None], [torch.empty(0, dtype=torch.uint8)]):
        assert load_object("decoder.layers.0._extra_state", empty)
    assert load_object("rng_state", [pickled])
    with pytest.raises(CheckpointError, match=r"layers\.0\._extra_state contains a pickled state"):
        load_object("decoder.layers.0._extra_state", [None, pickled])
    with pytest.raises(
        CheckpointError, match=r"__0_0\.distcp is damaged or contains more than tensors and plain values"
    ):
        load_object("rng_state", [os.getcwd])
