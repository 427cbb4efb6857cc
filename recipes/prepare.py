"""Turn chat data into packed datasets.

    harness prepare source.path=chats/ data.path=data/chats

Without arguments it prepares questions and answers about Python's standard library, made from its documentation.
"""

from __future__ import annotations

from harness.config import hydra_entry
from harness.prep import PrepareConfig, prepare


@hydra_entry("prepare", PrepareConfig)
def main(config: PrepareConfig) -> None:
    prepare(config)


if __name__ == "__main__":
    main()
