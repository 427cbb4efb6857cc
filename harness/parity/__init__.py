"""Proof that runs train the same: cells, their digests and losses, what differs first, reports and baselines."""
