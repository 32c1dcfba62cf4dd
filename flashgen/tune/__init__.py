"""One tuning run: workloads, resume, many searches at once."""
