"""A whole training run: open its data, model and checkpoint, train, record every step, and save.

`fine_tuning` and `pretraining` open their kind of data as a `Task`, and `checks` refuses what does not fit it;
`training` takes it from the meeting of the ranks to the last step, and `records` writes what each step leaves behind.
`rehearsal` is a step of single ranks of a job that does not run. Read `training.py` first.
"""
