"""A whole training run: open its data, model and checkpoint, train, record every step, and save.

Read `training` first; `rehearsal` is a step of single ranks of a job that does not run.
"""
