"""What a call brings: tensors, the features that they turn on, and the spec that they ask for.

torch is not imported: tensors are read by their attributes.
"""
