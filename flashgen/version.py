"""The version of flashgen."""

VERSION = "0.1.0"
