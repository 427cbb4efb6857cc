"""`harness bench formats`: what each format reads and writes, held against plain arrays on the same data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from harness.bench.figures import BenchReport
from harness.bench.formats_reading import measure_checks, measure_order, measure_peer, measure_random
from harness.bench.formats_settings import FormatsSettings
from harness.bench.formats_storing import measure_legacy, measure_open, measure_writing
from harness.bench.workspace import Workspace
from harness.errors import ConfigError

QUICK = FormatsSettings(packs=2000, rounds=3, reads=1000, peer_reads=20, open_packs=50_000, write_packs=2000)


def bench_formats(settings: FormatsSettings, workspace: Workspace, say: Callable[[str], None]) -> BenchReport:
    """Measure the parts that the settings name, of `PARTS`.

    Raises:
        ConfigError: there is no such part.
    """
    for part in settings.parts:
        if part not in PARTS:
            raise ConfigError(f"there is no part {part!r}", where="--part", fix=f"choose of {', '.join(PARTS)}")
    report = BenchReport("formats", asdict(settings))
    report.notes.append("reading in one thread is timed by its processor time, all else on the clock")
    for part in settings.parts:
        PARTS[part](settings, workspace, report, say)
    return report


Measure = Callable[[FormatsSettings, Workspace, BenchReport, Callable[[str], None]], None]
PARTS: dict[str, Measure] = {
    "random": measure_random,
    "order": measure_order,
    "peer": measure_peer,
    "checks": measure_checks,
    "open": measure_open,
    "write": measure_writing,
    "legacy": measure_legacy,
}
