"""Submit jobs to a Slurm cluster, and check their nodes before the first step.

`render` turns a `Job` and the settings of a cluster into a batch script, `plan_job` and `submit_job` go from an
experiment's name to a job in the queue, `jobs_of_run` finds the jobs of a run there, and `harness.launch.preflight` has
the checks that the script runs on every node. Read `script` first: the texts in it are what a job does.
"""
