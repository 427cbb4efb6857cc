"""Turn chat data into packed datasets.

    harness prepare source.path=chats/ --preview 3             # show the trained tokens; write nothing
    harness prepare source.path=chats/ data.path=data/chats

Without arguments, it prepares questions and answers generated from the documentation of Python's standard library.
"""

from __future__ import annotations

from harness.config import hydra_entry
from harness.prep import PrepareConfig, prepare, show_preview


def main(config: PrepareConfig) -> None:
    if config.preview:
        show_preview(config)
    else:
        prepare(config)


entry = hydra_entry("prepare", PrepareConfig, main)

if __name__ == "__main__":
    entry()
