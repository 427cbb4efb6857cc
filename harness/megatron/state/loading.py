"""Load checkpoints without running code in them: pickles may name only the classes that a checkpoint consists of.

Megatron and torch unpickle `.metadata` and the non-tensor objects in `.distcp` files without restriction. Here
`.metadata` goes through an unpickler with a list of allowed classes, and every object, like `common.pt`, through
torch's own restricted one, before either library reads it. Before that, `opcodes` bounds their memory and time.
"""

from __future__ import annotations

import importlib
import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from harness.errors import CheckpointError, HarnessError, LoaderError
from harness.megatron import compat
from harness.megatron.job.runtime import gather
from harness.megatron.job.watchdog import is_about_ranks
from harness.megatron.state.opcodes import MAX_PICKLE_BYTES, check_archive, check_pickle
from harness.storage.checksums import CHECKSUMS_FILE

METADATA_FILE, COMMON_FILE = ".metadata", "common.pt"
# Layers with grouped experts number the extra states of their experts.
_EXTRA_STATE = re.compile(r"_extra_state\d*$")
_FIX = "it is damaged or was not written by a training run: do not load it with another tool; use an older checkpoint"
# All classes in `.metadata`, in any supported version of torch, except torch's dtypes.
_CLASSES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    "torch.distributed._shard.sharded_tensor.metadata": ("MEM_FORMAT_ENCODING", "TensorProperties"),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
}


def load_tree(wanted: dict[str, Any], path: Path, *, fix: str) -> dict[str, Any]:
    """Return the result of `dist_checkpointing.load`, without running code in the checkpoint; every rank takes part.

    Raises:
        CheckpointError: a file contains more than tensors and plain values; a newer Megatron-Core wrote the checkpoint
            in a form that this version cannot read; or the checkpoint does not fit, for which the error suggests `fix`.
        LoaderError: it cannot be read, which may succeed at the next attempt.
        RuntimeError: another rank has died.
    """
    try:
        # Check the files before Megatron opens them: torch logs a traceback for unreadable metadata.
        if (path / COMMON_FILE).exists():
            with (path / COMMON_FILE).open("rb") as common:
                _load(common, COMMON_FILE, path)
        elif compat.COMMON_VALUES_HAVE_A_FILE:
            what = f"the checkpoint has no {COMMON_FILE}: megatron-core 0.17 and later store its values in a form that "
            what += f"{compat.MEGATRON_VERSION} cannot read"
            fix = "load it with the version of megatron_core in its run.json; every version loads checkpoints of 0.16"
            raise CheckpointError(what, where=str(path), fix=fix)
        with (path / METADATA_FILE).open("rb") as file:
            metadata = read_metadata(file, path)
        # Megatron would silently ignore weights that no rank requests, such as those of additional layers.
        weights = {name: values for name, values in wanted.items() if name.startswith("model")}
        own = {value.key for value in nested_values(load_preprocess(weights)[0]) if isinstance(value, ShardedBase)}
        stored = metadata.state_dict_metadata.items()
        names = {name for name, kind in stored if isinstance(kind, TensorStorageMetadata)}
        names = {name for name in names if not name.startswith("optimizer.")}
        if odd := sorted(names.difference(*gather(own))):
            raise ValueError(f"the model has no {odd[0]}" + f" and {len(odd) - 1} more" * (len(odd) > 1))
        with compat.checkpoints_read_by(lambda place: _Reader(place, metadata)):
            return cast(dict[str, Any], dist_checkpointing.load(wanted, str(path)))
    except HarnessError:
        raise
    # Megatron and torch raise many kinds of errors, one of which is not an Exception.
    except (Exception, CheckpointException) as error:
        causes = [cause for _, (cause, _) in sorted(getattr(error, "failures", {}).items())] or [error]
        if (refused := next((cause for cause in causes if isinstance(cause, HarnessError)), None)) is not None:
            raise refused from error
        if is_about_ranks(error):
            raise
        if (unread := next((cause for cause in causes if isinstance(cause, OSError)), None)) is not None:
            what = f"the checkpoint cannot be read: {unread}"
            raise LoaderError(what, where=str(path), fix="check the file system of that node") from error
        lines = [line.strip() for line in str(causes[0]).splitlines() if line.strip()]
        what = f"the checkpoint does not fit this run: {': '.join([type(causes[0]).__name__, *lines[:1]])}"
        raise CheckpointError(what, where=str(path), fix=fix) from error


def sharded_weights(model: Any) -> dict[str, Any]:
    """Return the sharded weights of a chunk of the model, with the same names for every layer specification.

    Extra states of Transformer Engine's modules are removed. No recipe of `model.fp8` needs them, because scales are
    computed from each tensor; with them, checkpoints of PyTorch's layers would be incomplete for Transformer Engine,
    and checkpoints of Transformer Engine would contain unknown entries for PyTorch's layers.
    """
    tensors = model.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group(None))
    return {name: value for name, value in tensors.items() if not _EXTRA_STATE.search(name)}


def put_weights(model: Any, weights: dict[str, Any]) -> None:
    """Copy the loaded tensors of `sharded_weights` into a chunk of the model."""
    names = model.load_state_dict(weights, strict=False)
    wrong = [name for name in (*names.missing_keys, *names.unexpected_keys) if not _EXTRA_STATE.search(name)]
    if wrong:
        raise RuntimeError(f"weights missing in the model or the checkpoint: {', '.join(wrong[:3])}")


def read_metadata(file: IO[bytes], where: Path) -> Metadata:
    """Return the metadata of a checkpoint; raise CheckpointError if it contains anything else."""
    try:
        data = file.read(MAX_PICKLE_BYTES + 1)
        if len(data) > MAX_PICKLE_BYTES:
            raise pickle.UnpicklingError(f"it is larger than {MAX_PICKLE_BYTES:,} bytes")
        check_pickle(data)
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}")
        for stored in metadata.storage_data.values():
            if Path(stored.relative_path).name != stored.relative_path:
                what = f"it refers to {stored.relative_path!r}, which is not a file of the checkpoint"
                raise pickle.UnpicklingError(what)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise _refused(METADATA_FILE, where, error) from None
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it requests {f'{module}.{name}'[:80]!r}")
        return getattr(importlib.import_module(module), name)


class _Reader(FileSystemReader):
    """Torch's reader for the files of a checkpoint, with metadata that was already checked; it checks the objects."""

    def __init__(self, path: str, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata, self._file = metadata, ""
        self._is_unchecked = not (Path(path) / CHECKSUMS_FILE).exists()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        self._file = sinfo.relative_path  # torch reads one file at a time
        stored: IO[bytes] = super()._slice_file(file, sinfo)
        check_archive(stored, compare=self._is_unchecked)
        return stored

    def read_data(self, plan: Any, planner: Any) -> Any:
        folder = Path(self.path)
        checked: Any = _CheckedObjects(planner, folder, self.storage_data)
        try:
            return super().read_data(plan, checked)
        except (pickle.UnpicklingError, EOFError, UnicodeDecodeError) as error:
            raise _refused(self._file, folder, error) from None


class _CheckedObjects:
    """A load planner that passes on only objects made of tensors and plain values."""

    def __init__(self, planner: Any, folder: Path, storage: Mapping[Any, Any]) -> None:
        self._planner, self._folder, self._storage = planner, folder, storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, item: Any, value: IO[bytes]) -> None:
        file = self._storage[item.storage_index].relative_path
        objects = _load(value, file, self._folder)
        # Transformer Engine unpickles extra states. Checkpoints of other tools without FP8 have empty ones.
        if "_extra_state" in item.dest_index.fqn and any(
            state is not None and not (isinstance(state, torch.Tensor) and state.numel() == 0) for state in objects
        ):
            raise _refused(file, self._folder, f"{item.dest_index.fqn} contains a pickled state")
        value.seek(0)
        self._planner.load_bytes(item, value)


def _load(file: IO[bytes], name: str, folder: Path) -> Any:
    try:
        check_archive(file, compare=not (folder / CHECKSUMS_FILE).exists())
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise _refused(name, folder, error) from None


def _refused(name: str, folder: Path, why: object) -> CheckpointError:
    text = " ".join(str(why).split())
    # Keep only the end of torch's message, because it starts with advice to switch the check off.
    found = text[text.find("Unsupported") :] if "Unsupported" in text else text
    what = f"the checkpoint's file {name} is damaged or contains more than tensors and plain values: {found[:160]}"
    return CheckpointError(what, where=str(folder), fix=_FIX)
