"""The plugins of inference engines with those engines' own classes: make -f tests/sessions.mk test-engines."""
