"""`harness bench gpu`: first contact with a machine of GPUs; on a CPU the same program in full. Read `parts` first."""
