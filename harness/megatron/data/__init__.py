"""Data of a Megatron job: batches for every rank, pretraining corpora in Megatron's datasets, and live streams.

Read `feed` first.
"""
