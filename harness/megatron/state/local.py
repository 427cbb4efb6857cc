"""Checkpoints on the nodes' own disks: where ranks write them, their copies on peer nodes, and resuming from them.

They are written by the same writer as all checkpoints, each rank's files on the disk of its own node, and then copied
to the next node of the job. A failing local disk is a warning: the checkpoints in the run's folder, which every node
reaches, are written as before. To resume, the newest one that is newer than those and of which every file is found on
some disk, whole, is copied into the run's folder, and is a checkpoint like any other from then on.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harness.errors import CheckpointError, FormatError
from harness.megatron.job.runtime import gather, gather_on_rank_0, on_rank_0
from harness.megatron.state.peers import Listener, PeerCopy, address_towards, own_address, receiver_of
from harness.storage import StoredFile, make_folder, read_checksums
from harness.storage.checksums import share_of
from harness.storage.files import sync_path
from harness.train.checkpoints import RUN_FILE, read_checkpoint
from harness.train.local import (
    LOCAL_RECORD,
    MANIFEST,
    DiskPart,
    Identity,
    LocalRecord,
    begin_local_attempt,
    copy_verified,
    prune_local,
    read_disk,
    write_local_record,
)

# More than the small files of a checkpoint, which are written after the large ones.
_ROOM_BYTES = 64 << 20
_PROBE_BYTES = 1 << 20


class _Place(NamedTuple):
    """A rank's place among the disks of a job.

    Attributes:
        disk: host, device and inode of the folder; None where it cannot be used, for the reason in `problem`.
    """

    host: str
    disk: tuple[str, int, int] | None
    problem: str
    listens: tuple[str, int] | None = None
    is_shared: bool = False


def _disk_of(folder: Path) -> tuple[str, int, int]:
    facts = folder.stat()
    return socket.gethostname(), facts.st_dev, facts.st_ino


def _ranks_by_disk(places: Sequence[_Place]) -> list[list[int]]:
    disks: dict[Any, list[int]] = {}
    for rank, place in enumerate(places):
        if place.disk is not None:
            disks.setdefault(place.disk, []).append(rank)
    return list(disks.values())


class LocalStore:
    """The local checkpoints that a run writes; every rank has one and calls its methods at the same points."""

    def __init__(
        self, record: LocalRecord, folder: Path, run: Path, *, log: Callable[[str], None], timeout_s: float
    ) -> None:
        self._record, self._folder, self._run = record, folder, run
        self._log, self._timeout_s = log, timeout_s
        self._listener: Listener | None = None
        self._copy: PeerCopy | None = None
        self._copies = 0
        self._needed_bytes = 0
        self._step = 0
        self._unfinished = folder
        # Names of the newest checkpoint and of the newest one with its copies, which are kept.
        self._newest = self._whole = ""

    @classmethod
    def open(
        cls, root: str, run: Path, identity: Identity, *, log: Callable[[str], None], timeout_s: float
    ) -> LocalStore | None:
        """Begin an attempt that writes local checkpoints; None, with a warning, if a disk cannot be used."""
        record = on_rank_0(lambda: begin_local_attempt(run, root, identity))
        if record is None:
            return None
        store = cls(record, record.folder(root), run, log=log, timeout_s=timeout_s)
        return store if store._meet() else None

    def _meet(self) -> bool:
        places = gather(self._own_place())
        self._rank = torch.distributed.get_rank()
        self._disks = _ranks_by_disk(places)
        self._is_first = any(ranks[0] == self._rank for ranks in self._disks)
        problems = [f"{place.host}: {place.problem}" for place in places if place.problem]
        if self._is_first:
            _remove_in_background([self._folder.parent] if problems else self._earlier_attempts())
        if problems:
            self._warn(f"no local checkpoints are written: {_first(problems)}")
            self.close()
            return False
        self._hosts = [places[ranks[0]].host for ranks in self._disks]
        setting = f"local checkpoints below {self._folder.parent.parent}"
        if len({place.host for place in places}) > 1 and any(place.is_shared for place in places):
            self._warn(f"{setting}: this is the file system of the run's folder, not a disk of each node")
        elif len(self._disks) == 1:
            self._log(f"{setting}: all ranks share one disk, so there is no copy on another node")
        else:
            self._log(f"{setting}, on {len(self._disks)} nodes; each keeps a copy of another's files")
        receivers = [receiver_of(rank, self._disks) for rank in range(len(places))]
        self._receivers = [receiver for receiver in receivers if receiver is not None]
        if self._receivers:
            self._listens = self._listen(places)
            self._token = on_rank_0(lambda: secrets.token_bytes(32))
        elif self._listener is not None:
            self._listener.close()
        return True

    def _own_place(self) -> _Place:
        host = socket.gethostname()
        try:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._probe(self._folder)
            except OSError:
                for path in self._earlier_attempts():  # they may fill the disk
                    shutil.rmtree(path, ignore_errors=True)
                self._folder.mkdir(parents=True, exist_ok=True)
                self._probe(self._folder)
            place = _Place(host, _disk_of(self._folder), "", None, _disk_of(self._folder)[1] == self._run.stat().st_dev)
        except OSError as error:
            return _Place(host, None, _reason(error, self._folder))
        if torch.distributed.get_world_size() > 1:
            try:
                self._listener = Listener(own_address())
            except OSError as error:
                return _Place(host, None, f"no connections from other nodes: {error.strerror or error}")
            place = place._replace(listens=self._listener.place)
        return place

    def _earlier_attempts(self) -> list[Path]:
        """Return the folders of earlier attempts on this node's disk, from which none resumes once this one trains."""
        with suppress(OSError):
            return [path for path in self._folder.parent.iterdir() if path != self._folder]
        return []

    def _listen(self, places: Sequence[_Place]) -> list[tuple[str, int]]:
        assert self._listener is not None
        other = next((place.listens[0] for place in places if place.listens and not _is_loopback(place)), None)
        if other is not None and _is_loopback(places[self._rank]):
            # The first node may know itself by its loopback address alone.
            with suppress(OSError):  # then its peers cannot connect, and say so
                before, self._listener = self._listener, Listener(address_towards(other))
                before.close()
        return gather(self._listener.place)

    @property
    def is_copying(self) -> bool:
        """True while copies of the newest are being made."""
        return self._copy is not None

    def skip(self, step: int) -> None:
        """Log that no checkpoint of this step is written, because an earlier one still is."""
        self._log(f"no local checkpoint of step {step}: the previous one is still being written or copied")

    def make_folder(self, step: int) -> Path | None:
        """Return the folder into which this rank writes; None, with a warning, if a node's disk cannot take it."""
        self._step = step
        name = _name(step)
        self._unfinished = self._folder / f"{name}.unfinished"
        problem = ""
        if self._is_first:
            try:
                _remove_in_background(prune_local(self._folder, [self._whole or self._newest]))
                self._unfinished.mkdir(parents=True)
                free = shutil.disk_usage(self._unfinished).free
                if free < (needed := self._needed_bytes + _ROOM_BYTES):
                    problem = f"{self._folder} has {free:,} bytes free, but requires {needed:,}"
                self._probe(self._unfinished)
            except OSError as error:
                problem = _reason(error, self._unfinished)
        if self._agree(problem):
            return self._unfinished
        self._discard()
        return None

    def _probe(self, folder: Path) -> None:
        """Write and remove a file, so that a full or failing disk is found before all ranks write."""
        probe = folder / f"probe-{os.getpid()}"
        try:
            with probe.open("wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)

    def complete(self, own: list[StoredFile], describe: Callable[[list[StoredFile]], None]) -> None:
        """Give the checkpoint that all ranks have written its name on every disk, and begin to copy it to the peers.

        Args:
            describe: on rank 0, completes the unfinished folder with the manifest, from the files of all ranks.
        """
        by_rank = gather_on_rank_0(own)
        manifest, by_rank, problem = on_rank_0(lambda: self._describe(by_rank, describe))
        if not problem and self._is_first:
            problem = self._name(manifest)
        if not self._agree(problem):
            self._discard()
            return
        self._newest = _name(self._step)
        record = replace(self._record, step=self._step, hosts=tuple(sorted(set(self._hosts))))
        on_rank_0(lambda: write_local_record(self._run, record))
        disk = next(ranks for ranks in self._disks if self._rank in ranks)
        senders = [rank for rank, receiver in enumerate(self._receivers) if receiver in disk]
        self._needed_bytes = sum(file.num_bytes for rank in [*disk, *senders] for file in by_rank[rank])
        if not self._receivers:
            self._whole = self._newest
            return
        assert self._listener is not None
        self._copies += 1
        self._copy = PeerCopy(
            self._rank,
            self._folder / self._newest,
            by_rank,
            self._receivers,
            listener=self._listener,
            places=self._listens,
            token=self._token,
            number=self._copies,
            timeout_s=self._timeout_s,
        )

    def _describe(
        self, by_rank: list[list[StoredFile]], describe: Callable[[list[StoredFile]], None]
    ) -> tuple[dict[str, bytes], list[list[StoredFile]], str]:
        try:
            known = [file for files in by_rank for file in files]
            describe(known)
            manifest = {name: (self._unfinished / name).read_bytes() for name in MANIFEST}
            late = {file.path: file for file in read_checksums(self._unfinished) or []}
        except OSError as error:
            return {}, by_rank, _reason(error, self._unfinished)
        for file in known:
            del late[file.path]
        del late[RUN_FILE]
        return manifest, [[*by_rank[0], *late.values()], *by_rank[1:]], ""

    def _name(self, manifest: dict[str, bytes]) -> str:
        try:
            for name, content in manifest.items():
                (self._unfinished / name).write_bytes(content)
            self._unfinished.rename(self._folder / _name(self._step))
        except OSError as error:
            return _reason(error, self._unfinished)
        return ""

    def check_copies(self) -> None:
        """Remove the checkpoint before the newest once all copies of the newest are made; every rank takes part."""
        if self._copy is None:
            return
        is_done = torch.tensor([self._copy.is_done], dtype=torch.int32, device=torch.cuda.current_device())
        torch.distributed.all_reduce(is_done, op=torch.distributed.ReduceOp.MIN)
        if not is_done.item():
            return
        problems = [problem for found in gather(self._copy.problems) for problem in found]
        self._copy = None
        if problems:
            self._warn(f"files of the local checkpoint of step {self._step} have no copy: {_first(problems)}")
            return
        self._whole = self._newest
        if self._is_first:
            with suppress(OSError):  # tried again before the next
                _remove_in_background(prune_local(self._folder, [self._whole]))

    def give_up(self, error: CheckpointError) -> None:
        """Log that a checkpoint cannot be written, and remove what there is of it."""
        what = error.what.replace("the checkpoint", "the local checkpoint", 1)
        self._warn(f"{what}\n  where: {error.where}\n  training continues without it")
        self._discard()

    def _agree(self, problem: str) -> bool:
        problems = [f"{host}: {text}" for host, text in gather((socket.gethostname(), problem)) if text]
        if problems:
            self._warn(f"the local checkpoint of step {self._step} cannot be written: {_first(problems)}")
        return not problems

    def _discard(self) -> None:
        if self._is_first:
            shutil.rmtree(self._unfinished, ignore_errors=True)

    def _warn(self, text: str) -> None:
        self._log(f"warning: {text}")

    def remove(self) -> None:
        """Remove all local checkpoints of the run from this node's disk: a newer one is whole in the run's folder."""
        self.close()
        on_rank_0(lambda: (self._run / LOCAL_RECORD).unlink(missing_ok=True))
        if self._is_first:
            shutil.rmtree(self._folder.parent, ignore_errors=True)

    def close(self) -> None:
        """End the copies that are being made, and stop listening."""
        if self._copy is not None:
            self._copy.close()
        if self._listener is not None:
            self._listener.close()


class LocalCopies:
    """The local checkpoints of a run's last attempt, to resume from; every rank takes part in each method."""

    def __init__(self, root: str, record: LocalRecord) -> None:
        self._root, self._record = root, record
        self._folder = record.folder(root)
        # On rank 0, by name: a part with the manifest, and for each file the ranks of every disk that has it in its
        # right size.
        self._found: dict[str, tuple[DiskPart, dict[str, list[list[int]]]]] = {}
        self.notes: list[str] = []

    def names(self) -> list[str]:
        """Return the local checkpoints of which a disk has anything, and the one that was written last."""
        place = _Place(socket.gethostname(), None, "")
        if self._root:
            with suppress(OSError):
                place = place._replace(disk=_disk_of(self._folder))
        disks = _ranks_by_disk(gather(place))
        own = next((ranks for ranks in disks if torch.distributed.get_rank() == ranks[0]), None)
        parts = gather_on_rank_0({} if own is None else read_disk(self._record, self._root))

        def merge() -> list[str]:
            names = {name for held in parts for name in held}
            for name in names:
                held = [(ranks, parts[ranks[0]][name]) for ranks in disks if name in parts[ranks[0]]]
                whole = next((part for _, part in held if part.manifest), DiskPart({}, {}, ()))
                holders = {
                    file.path: [ranks for ranks, part in held if part.sizes.get(file.path) == file.num_bytes]
                    for file in whole.files
                }
                self._found[name] = whole, holders
            return sorted(names | ({_name(self._record.step)} if self._record.step else set()))

        return on_rank_0(merge)

    def promote(self, name: str, checkpoints: Path) -> CheckpointError | None:
        """Copy a local checkpoint into the run's folder; return why it is not whole, None once it is there.

        Raises:
            CheckpointError: it is whole, and cannot be written there.
        """
        missing = on_rank_0(lambda: self._missing(name))
        if missing is not None:
            return missing
        target = checkpoints / on_rank_0(lambda: f"{name}.unfinished-{secrets.token_hex(8)}")
        on_rank_0(lambda: make_folder(target))
        problems: dict[str, list[str]] = {}
        tried: dict[str, int] = {}
        while True:
            tasks = on_rank_0(lambda: self._assign(name, tried))
            if not any(tasks):
                break
            outcomes = gather(self._copy(name, tasks[torch.distributed.get_rank()], target))
            on_rank_0(partial(self._note, target, tried, problems, outcomes))
        return on_rank_0(lambda: self._finish(name, target, tried, problems))

    def _missing(self, name: str) -> CheckpointError | None:
        step, (whole, holders) = int(name.removeprefix("step-")), self._found.get(name, (DiskPart({}, {}, ()), {}))
        wrote = f" (written on {', '.join(self._record.hosts)})" if step == self._record.step else ""
        what, fix = "", "if a node that has them is available, cancel this run and resume it there"
        if not self._root:
            what, fix = "trainer.local_checkpoints is not set", "set it to the previous folder to use this checkpoint"
        elif name not in self._found:
            what = "no node of this job has any of its files"
        elif not whole.files:
            what = "its checksums.json and run.json are damaged, or of another run, on every node that has them"
        elif lost := [file.path for file in whole.files if not holders.get(file.path)]:
            what = f"missing or truncated on all nodes: {len(lost)} of {len(whole.files)} files: {', '.join(lost[:3])}"
        if not what:
            return None
        return CheckpointError(
            f"the local checkpoint of step {step}{wrote} is incomplete: {what}", where=str(self._folder / name), fix=fix
        )

    def _assign(self, name: str, tried: dict[str, int]) -> list[list[StoredFile]]:
        """Return for every rank the files that it copies next; `tried` counts the disks tried, -1 once it is copied."""
        whole, holders = self._found[name]
        tasks: list[list[StoredFile]] = [[] for _ in range(torch.distributed.get_world_size())]
        by_disk: dict[tuple[int, ...], list[StoredFile]] = {}
        for file in whole.files:
            at, disks = tried.get(file.path, 0), holders[file.path]
            if 0 <= at < len(disks):
                by_disk.setdefault(tuple(disks[at]), []).append(file)
        for ranks, files in by_disk.items():
            for number, rank in enumerate(ranks):
                tasks[rank] += share_of(files, number, len(ranks))
        return tasks

    def _copy(self, name: str, files: Sequence[StoredFile], target: Path) -> list[tuple[str, str, str]]:
        """Return for each file the problem of its source and of its target, empty for none."""
        outcomes = []
        for file in files:
            unreadable = unwritable = ""
            try:
                copy_verified(self._folder / name / file.path, target / file.path, file)
            except FormatError as error:
                unreadable = f"{file.path} on {socket.gethostname()} {error.what}"
            except OSError as error:
                unwritable = f"{socket.gethostname()}: {_reason(error, target)}"
            outcomes.append((file.path, unreadable, unwritable))
        return outcomes

    def _note(
        self,
        target: Path,
        tried: dict[str, int],
        problems: dict[str, list[str]],
        outcomes: list[list[tuple[str, str, str]]],
    ) -> None:
        for path, unreadable, unwritable in (outcome for one in outcomes for outcome in one):
            if unwritable:
                raise self._no_room(target, unwritable)
            tried[path] = tried.get(path, 0) + 1 if unreadable else -1
            if unreadable:
                problems.setdefault(path, []).append(unreadable)

    def _no_room(self, target: Path, why: str) -> CheckpointError:
        shutil.rmtree(target, ignore_errors=True)  # it would take the room of the next attempt's copy
        return CheckpointError(
            f"a local checkpoint cannot be copied into the run's folder: {why}",
            where=str(self._folder),
            fix="free disk space there and resume again; the local files are kept",
        )

    def _finish(
        self, name: str, target: Path, tried: dict[str, int], problems: dict[str, list[str]]
    ) -> CheckpointError | None:
        lost = [path for path, at in tried.items() if at >= 0]
        if lost:
            shutil.rmtree(target, ignore_errors=True)
            what = "; ".join(problem for path in lost[:3] for problem in problems[path])
            return CheckpointError(
                f"the local checkpoint of step {int(name[5:])} is incomplete: {what}",
                where=str(self._folder / name),
                fix="an older one is used; check the disks of these nodes",
            )
        try:
            for file, content in self._found[name][0].manifest.items():
                (target / file).write_bytes(content)
                sync_path(target / file)
            read_checkpoint(target)
            sync_path(target)
            final = target.with_name(name)
            if final.exists():  # damaged, or it would have been used
                shutil.rmtree(final.rename(final.with_suffix(".removed")))
            target.rename(final)
            sync_path(target.parent)
        except OSError as error:
            raise self._no_room(target, f"{socket.gethostname()}: {_reason(error, target)}") from error
        self.notes += [f"{one}; that of another node is used" for found in problems.values() for one in found]
        return None


def _is_loopback(place: _Place) -> bool:
    return place.listens is not None and (place.listens[0].startswith("127.") or place.listens[0] == "::1")


def _remove_in_background(paths: Sequence[Path]) -> None:
    def remove() -> None:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)

    if paths:
        threading.Thread(target=remove, daemon=True).start()


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _reason(error: OSError, path: Path) -> str:
    return f"{error.strerror or error}, {error.filename or path}"


def _first(problems: Sequence[str]) -> str:
    return problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
