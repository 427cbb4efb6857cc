"""Job of a run: its ranks and their devices, and the signals, hangs and lost ranks that can end it.

Read `runtime` first; `all_reduce` is the preflight's check of the links.
"""
