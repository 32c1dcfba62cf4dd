"""Whether a kernel is right and how fast it is, in child processes that may crash or hang."""
