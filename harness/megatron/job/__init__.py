"""The job of a run: its ranks and their device, and the signals, hangs and lost ranks that can end it.

`runtime` starts a process in its job and joins Megatron's groups; `watchdog` turns signals into a last checkpoint, and
names the rank that holds the others up; `waits` measures exchanges with other ranks; `all_reduce` is the
preflight's check of the links.
"""
