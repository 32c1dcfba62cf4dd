"""Triton source to cubin, and the facts of its main loops read from SASS."""
