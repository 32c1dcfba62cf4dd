"""The text of a kernel and its launch: render, signature, launch."""
