"""Entries, configs/<slug>.yaml in and out, and generated/ made from them."""
