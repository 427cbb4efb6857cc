"""What a fresh process pays: `python -m harness.bench.probe NAME ARGUMENT...` measures and prints JSON.

Everything is imported before the measuring begins, so that the figures are those of the data.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import harness
from harness.errors import ConfigError, HarnessError

_MEMORY_FILE = Path("/proc/self/statm")
_TIMEOUT_S = 1800.0


def measure_apart(probe: str, *arguments: str) -> dict[str, float]:
    """Run a probe of this module in a process of its own.

    Returns:
        seconds and megabytes (of resident memory above what the imports take), as far as the probe measures them.

    Raises:
        ConfigError: this system does not say how much memory a process takes.
        HarnessError: the probe failed; the error has what it wrote.
    """
    if not _MEMORY_FILE.exists():
        raise ConfigError(
            "this system does not say what memory a process takes", where=str(_MEMORY_FILE), fix="measure on Linux"
        )
    root = str(Path(harness.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "harness.bench.probe", probe, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise HarnessError(
            f"measuring {probe} in a process of its own failed: {done.stderr.strip()[-2000:]}",
            where=" ".join(arguments),
            fix="run `python -m harness.bench.probe` with these arguments to see it alone",
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def resident_megabytes() -> float:
    """Resident memory of this process, mapped pages of files included."""
    return int(_MEMORY_FILE.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def anonymous_megabytes() -> float:
    """Memory of this process that is in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1e3


def _probe_open(path: str) -> dict[str, float]:
    """Opening a dataset, and asking how many packs and sequences it has."""
    from harness.formats import FORMATS, load_format, open_dataset

    for name in FORMATS:
        load_format(name)
    before = resident_megabytes()
    began = time.perf_counter()
    reader = open_dataset(path)
    packs, sequences = len(reader), int(reader.pack_offsets[-1])
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "megabytes": resident_megabytes() - before,
        "packs": float(packs),
        "sequences": float(sequences),
    }


def _probe_numpy_load(path: str) -> dict[str, float]:
    """Loading a pickled `.npy` the way that tools do which train from it."""
    import numpy as np

    before = resident_megabytes()
    began = time.perf_counter()
    packs = np.load(path, allow_pickle=True)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "megabytes": resident_megabytes() - before, "packs": float(len(packs))}


def _probe_first_batch(path: str, workers: str, global_batch: str, max_tokens_per_rank: str) -> dict[str, float]:
    """From opening a dataset to holding the first batch."""
    from harness.formats import FORMATS, load_format, open_dataset
    from harness.loader.loader import Loader, LoaderConfig
    from harness.schedule import ScheduleConfig

    for name in FORMATS:
        load_format(name)
    config = LoaderConfig(num_workers=int(workers), global_batch_size=int(global_batch))
    began = time.perf_counter()
    reader = open_dataset(path)
    with Loader(reader, config, schedule=ScheduleConfig(max_tokens_per_rank=int(max_tokens_per_rank))) as loader:
        batch = next(iter(loader))
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "packs": float(len(reader)), "tokens": float(batch.num_tokens)}


def _probe_prepare(source: str, tokenizer: str, folder: str) -> dict[str, float]:
    """A whole preparation in this process; the most that it held beside mapped files."""
    import threading

    from rich.console import Console

    from harness.formats import load_format
    from harness.prep.packing import PackingConfig
    from harness.prep.pipeline import PrepareConfig, prepare
    from harness.prep.sources import SourceConfig
    from harness.prep.tokenize import ChatTokenizer, TokenizerConfig

    load_format("memmap")
    named = TokenizerConfig(name=tokenizer)
    ChatTokenizer(named)
    data = PackingConfig(path=folder, packed_storage="memmap", num_workers=0)
    config = PrepareConfig(SourceConfig("files", source), named, data)
    before = most = anonymous_megabytes()
    is_over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.01):
            most = max(most, anonymous_megabytes())

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.perf_counter()
    try:
        with Path(os.devnull).open("w") as nowhere:
            report = prepare(config, console=Console(file=nowhere))
    finally:
        is_over.set()
        watching.join()
    return {
        "seconds": time.perf_counter() - began,
        "megabytes": most - before,
        "conversations": float(sum(split.conversations for split in report.splits.values())),
    }


def _probe_tokenize_shard(source: str, tokenizer: str, folder: str) -> dict[str, float]:
    """A file of conversations to a shard on disk, once for the caches and once for the clock of this process."""
    from harness.prep.engines import Receipt, ShardJob, TokenizeJob, do_shard
    from harness.prep.reading import cut_shards
    from harness.prep.tokenize import ChatTokenizer, TokenizerConfig

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    loaded = ChatTokenizer(TokenizerConfig(name=tokenizer))
    job = TokenizeJob(tokenizer, "", "generation", "refuse", 1 << 20, "drop")
    (shard,) = cut_shards([Path(source)], shard_bytes=1 << 40)
    seconds, tokens = 0.0, 0
    for again in range(2):
        began = time.process_time()
        made = do_shard(ShardJob(f"{folder}-{again}", job, "", True), 0, shard, lambda _: loaded)
        seconds = time.process_time() - began
        assert isinstance(made, Receipt), made
        tokens = made.tokens
    return {"megabytes_per_s": _text_megabytes(source, tokenizer)[1] / seconds, "tokens": float(tokens)}


def _probe_tokenizers_alone(source: str, tokenizer: str) -> dict[str, float]:
    """The same conversations as text in memory to token ids, by the tokenizers library and nothing else."""
    import tokenizers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    library = tokenizers.Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    texts, megabytes = _text_megabytes(source, tokenizer)
    seconds, tokens = 0.0, 0
    for _ in range(2):
        began = time.process_time()
        tokens = sum(len(one.ids) for one in library.encode_batch(texts, add_special_tokens=False))
        seconds = time.process_time() - began
    return {"megabytes_per_s": megabytes / seconds, "tokens": float(tokens)}


def _text_megabytes(source: str, tokenizer: str) -> tuple[list[str], float]:
    """Every conversation's text, by the template, and how many megabytes they are."""
    import transformers

    template = transformers.AutoTokenizer.from_pretrained(tokenizer)
    with Path(source).open() as file:
        texts = [template.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in file]
    return texts, sum(len(text.encode()) for text in texts) / 1e6


_PROBES: dict[str, Callable[..., dict[str, float]]] = {
    "open": _probe_open,
    "numpy_load": _probe_numpy_load,
    "first_batch": _probe_first_batch,
    "prepare": _probe_prepare,
    "tokenize_shard": _probe_tokenize_shard,
    "tokenizers_alone": _probe_tokenizers_alone,
}

if __name__ == "__main__":
    print(json.dumps(_PROBES[sys.argv[1]](*sys.argv[2:])))
