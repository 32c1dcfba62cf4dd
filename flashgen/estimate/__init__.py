"""A model of one SM: the time of a launch estimated from SASS, grid and target."""
