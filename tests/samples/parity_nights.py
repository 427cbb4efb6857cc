"""Handwritten histories of parity runs, for tests of the pages that are rendered from them."""

from __future__ import annotations

from harness.parity.history import History, Metric, Night

NEWEST = "2026-11-20T02:10:00+00:00"


def nights(values: list[float | None], low: float, high: float) -> list[Night]:
    """Return one night per value, from November 1; the first three have no band."""
    return [
        Night(f"2026-11-{number:02d}T02:10:00+00:00", value, *((low, high) if number > 3 else (None, None)), "r.json")
        for number, value in enumerate(values, start=1)
    ]


def quiet() -> History:
    """Return a history in which no metric ever left its band."""
    loss = Metric("loss at step 40", "formats: parquet", "nats", nights([4.1, 4.11, 4.1] * 6, 4.0, 4.2), "± 2%")
    return History("Every format trains as the legacy npy does", [loss])


def restless() -> History:
    """Return metrics that left their bands on the newest night or earlier, one with a gap, and one never measured."""
    rate = [0.95 + 0.01 * (number % 3) for number in range(20)]
    rate[-1] = 0.61
    memory: list[float | None] = [1250.0 + number for number in range(20)]
    memory[9] = 1900.0
    loss: list[float | None] = [4.1 + 0.001 * (number % 5) for number in range(20)]
    loss[12] = None
    return History(
        "Every format trains as the legacy npy does",
        [
            Metric("tokens/s, to the reference reader", "formats: parquet", "x", nights(rate, 0.9, 1.05), "± 10%"),
            Metric("peak memory", "formats: memmap", "MB", nights(memory, 1200, 1400)),
            Metric("loss at step 40", "<b>bold</b>", "nats", nights(loss, 4.0, 4.2)),
            Metric("never measured", "formats: jsonl", "", nights([None] * 3, 0, 1)),
        ],
    )
