"""The evaluators: gpu (compiles, checks and times on a device), offline (compiles, interprets and
estimates with none), replay (answers from records) and quarantining (keeps from another what killed
a process). worker is their child process, child its parent's side, pool several of them.
"""
