"""What this machine does: every figure is measured against something else in the same run."""
