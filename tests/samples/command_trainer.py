"""The plain trainer as a command that prints a line of JSON per step, for `harness conformance --command`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from plain_trainer import Trainer

from harness.conformance import Layout

parser = argparse.ArgumentParser()
for name in ("model", "data", "load", "save", "eval"):
    parser.add_argument(f"--{name}", default="")
for name, default in (("steps", 0), ("pack", 0), ("accumulate", 1)):
    parser.add_argument(f"--{name}", type=int, default=default)
given = parser.parse_args()

trainer = Trainer()
data = Path(given.data)
step = trainer.build(Path(given.model), data, Layout(pack_size=given.pack, microbatches=given.accumulate))
if given.load:
    trainer.load(Path(given.load))
print("a trainer prints other lines too")
if given.eval:
    held_out = [json.loads(line) for line in Path(given.eval).read_text().splitlines()]
    print(json.dumps({"step": 0, "eval_loss": trainer.evaluate(held_out)}))
elif given.save:
    for number, rows in enumerate(trainer.rows(given.steps or None), start=1):
        print(json.dumps({"step": number, "rows": rows}))
    trainer.save(Path(given.save))
else:
    loss, norm = step([json.loads(line) for line in data.read_text().splitlines()])
    print(json.dumps({"step": 1, "loss": loss, "grad_norm": norm}))
