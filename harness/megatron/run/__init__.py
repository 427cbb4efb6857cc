"""Run a whole training: open data, model and checkpoint, train, record every step, and save.

Read `training` first; `rehearsal` trains single ranks of a job for a step without the other ranks.
"""
