"""How a spec may be computed: a module for each schedule, and what is legal, tried and a default.

A new schedule is a module with a Schedule, a line in config.SCHEDULES, and a template.
"""
