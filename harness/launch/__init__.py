"""Jobs on a Slurm cluster: the batch script, its submission, and what every node is asked before the first step."""
