"""Costs that are measured in a fresh process, by `harness.bench.apart`.

Everything is imported before the measuring begins, so that the figures are those of the data alone.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from harness.bench import load

_MEMORY_FILE = Path("/proc/self/statm")
# Of a soak: three in each quarter.
MIN_PASSES = 12


def _resident_megabytes() -> float:
    return int(_MEMORY_FILE.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def open_apart(path: str) -> dict[str, float]:
    from harness.formats import FORMATS, load_format, open_dataset

    for name in FORMATS:
        load_format(name)
    before = _resident_megabytes()
    start = time.perf_counter()
    reader = open_dataset(path)
    counts = {"packs": len(reader), "sequences": int(reader.pack_offsets[-1])}
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "megabytes": _resident_megabytes() - before, **counts}


def load_by_numpy(path: str) -> dict[str, float]:
    """Load a pickled `.npy` the way tools that train from it do."""
    import numpy as np

    before = _resident_megabytes()
    start = time.perf_counter()
    packs = np.load(path, allow_pickle=True)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "megabytes": _resident_megabytes() - before, "packs": len(packs)}


def soak(path: str, workers: str, global_batch: str, max_tokens_per_rank: str, seconds: str) -> dict[str, list[float]]:
    """Read a dataset again and again; count what this process and its workers hold at the end of each pass."""
    import warnings

    from harness.formats import open_dataset
    from harness.loader import Loader, LoaderConfig
    from harness.schedule import ScheduleConfig

    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores, which a soak may have
    config = LoaderConfig(num_workers=int(workers), global_batch_size=int(global_batch))
    held: dict[str, list[float]] = {"megabytes": [], "files": [], "threads": []}
    end = time.monotonic() + float(seconds)
    schedule = ScheduleConfig(max_tokens_per_rank=int(max_tokens_per_rank))
    with Loader(open_dataset(path), config, schedule=schedule) as loader:
        batches = iter(loader)
        while len(held["files"]) < MIN_PASSES or time.monotonic() < end:
            for _ in range(loader.num_steps_per_epoch or 0):
                next(batches)
            processes = [str(os.getpid()), *_children()]
            held["megabytes"].append(sum(_proportional_megabytes(process) for process in processes))
            held["files"].append(sum(_entries(f"/proc/{process}/fd") for process in processes))
            held["threads"].append(sum(_entries(f"/proc/{process}/task") for process in processes))
    return held


def _entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def _children() -> list[str]:
    tasks = Path("/proc/self/task")
    return [child for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def _proportional_megabytes(process: str) -> float:
    """Return the memory of a process, with shared pages divided by their users, and without those of mapped files.

    The system keeps pages of files while it has room, and drops them when others need it.
    """
    lines = (line.split() for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines())
    return sum(int(words[1]) for words in lines if words[0] in ("Pss_Anon:", "Pss_Shmem:")) / 1e3


def tokenize_shard(source: str, tokenizer: str, folder: str) -> dict[str, float]:
    """Tokenize a file of conversations to a shard on disk, once to fill caches and once for the clock."""
    from harness.prep import TokenizerConfig
    from harness.prep.shards import Receipt, ShardJob, do_shard
    from harness.prep.sources.reading import cut_shards

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    (shard,) = cut_shards([Path(source)], shard_bytes=1 << 40)
    seconds, tokens = 0.0, 0
    for again in range(2):
        start = _processor_s()
        job = ShardJob(
            folder=f"{folder}-{again}",
            tokenizer=TokenizerConfig(name=tokenizer),
            content="",
            today="",
            pack_size=1 << 20,
            over_long="drop",
            on_bad="refuse",
        )
        made = do_shard(job, 0, shard)
        seconds = _processor_s() - start
        assert isinstance(made, Receipt), made
        tokens = made.tokens
    return {"megabytes_per_s": _text_megabytes(source, tokenizer)[1] / seconds, "tokens": float(tokens)}


def _processor_s() -> float:
    """Return the processor time of this process and of its children that run, such as the one that renders."""
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in _children()]
    return time.process_time() + sum(int(tick) for pair in ticks for tick in pair) / os.sysconf("SC_CLK_TCK")


def tokenizers_alone(source: str, tokenizer: str) -> dict[str, float]:
    """Turn the same conversations, as text in memory, into token ids by the tokenizers library alone."""
    import tokenizers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    library = tokenizers.Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    texts, megabytes = _text_megabytes(source, tokenizer)
    seconds, tokens = 0.0, 0
    for _ in range(2):
        start = time.process_time()
        tokens = sum(len(encoding.ids) for encoding in library.encode_batch(texts, add_special_tokens=False))
        seconds = time.process_time() - start
    return {"megabytes_per_s": megabytes / seconds, "tokens": float(tokens)}


def _text_megabytes(source: str, tokenizer: str) -> tuple[list[str], float]:
    import transformers

    template = transformers.AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    with Path(source).open() as file:
        records = [json.loads(line) for line in file]
    texts = [
        template.apply_chat_template(record["messages"], tools=record.get("tools"), tokenize=False)
        for record in records
    ]
    return texts, sum(len(text.encode()) for text in texts) / 1e6


def measure_saving(*arguments: str) -> list[dict[str, float]]:
    """Return what `checkpoints.measure_saving` does on a rank that is prepared for Megatron-Core."""
    found: list[dict[str, float]] = load("tests.benchmarks.checkpoints:measure_saving", uses_megatron=True)(*arguments)
    return found
