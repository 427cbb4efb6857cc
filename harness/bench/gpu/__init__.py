"""`harness bench gpu`: first contact with a machine of GPUs, in resumable parts; on a CPU the same program in full.

Each part is a process (or one a rank) that writes a JSON file; `parts` starts those that have none yet, and makes one
JSON and one page of all. Read `parts` first, then one part, such as `training`; `environment` has their sizes.
"""
