"""Save and load the state of a run in checkpoints that any layout and either of Megatron's optimizers can load.

Read `checkpoint` first.
"""
