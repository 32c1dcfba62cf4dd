"""The plugins of inference engines with those engines' own classes: make test-engines."""
