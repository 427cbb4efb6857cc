"""What a run leaves for a person to read: metrics, plots, reports, benchmarks."""
