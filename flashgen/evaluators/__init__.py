"""The evaluators: gpu (compiles, checks and times on a device), offline (compiles, interprets and
estimates with none) and replay (answers from records). worker is their child process, pool its
parent.
"""
