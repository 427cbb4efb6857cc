"""Check whether training can start on every node of a job.

`node_checks` and `run_checks` run on each node and print a line of JSON per check (`probe`, `hardware`);
`judge_nodes` compares the lines of all nodes and reports each fault with its node and its fix (`judge`). For a node
that did not answer, it reads the messages of `srun`.
"""
