"""Save and load the state of a run: checkpoints that any layout and either of Megatron's optimizers can load.

`checkpoint.py` writes and reads them; `loading.py` makes sure that reading runs no code of theirs; `optimizer.py` gives
the optimizer's state one form on disk.
"""
