"""Data of a Megatron job: batches for every rank, a pretraining corpus through Megatron's datasets, and streams.

Read `feed` first.
"""
