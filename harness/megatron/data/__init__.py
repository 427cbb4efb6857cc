"""Data of a Megatron job: batches for every rank, a pretraining corpus through Megatron's datasets, and streams.

`feed` gives each rank the batches of a loader, and turns an error of one rank into an error of all; `live_feed` does
the same for live chunks. `corpus` checks the sources and builds Megatron's datasets; `samples` reads them.
Read `feed` first.
"""
