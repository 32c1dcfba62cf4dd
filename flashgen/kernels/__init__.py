"""Kernel text and launch: render, signature, launch."""
