"""The job of a run: its ranks and their device, and the signals, hangs and lost ranks that can end it.

Read `runtime` first; `all_reduce` is the preflight's check of the links.
"""
