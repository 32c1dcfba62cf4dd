"""Checks whether a kernel is correct and measures how fast it is, in child processes."""
