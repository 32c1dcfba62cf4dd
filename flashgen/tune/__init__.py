"""One tuning run: workloads, resume, shared runs."""
