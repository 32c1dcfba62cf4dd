"""Executes what the compiler made: PTX for sm_80 to sm_120 on a CPU, in numpy, with the checks for
memory, races, contents and barriers. docs/execution.md says what is modelled and what is not.
"""
