"""Submit jobs to a Slurm cluster, and check their nodes before the first step.

`render` turns a `Job` and the settings of a cluster into a batch script. `plan_job` and `submit_job` turn an experiment
into a job in the queue, and `jobs_of_run` finds the jobs of a run there. `harness.launch.preflight` contains the checks
that the script runs on every node. Read `script` first: it assembles every step of a job.
"""
