"""Child processes that run tasks within limits of time and memory."""
