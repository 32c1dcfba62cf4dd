"""The claims of the FlashAttention papers, shown on this machine without a GPU."""
