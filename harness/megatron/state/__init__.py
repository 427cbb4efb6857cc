"""Save and load the state of a run: checkpoints that any layout and either of Megatron's optimizers can load.

`checkpoint.py` writes and reads them; `local.py` keeps some on the nodes' own disks, which `peers.py` copies from node
to node; `loading.py` makes sure that reading runs no code of theirs; `optimizer.py` gives
the optimizer's state one form on disk.
"""

from __future__ import annotations
