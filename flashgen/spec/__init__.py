"""What is asked, how it is computed, what is legal, and outcomes. Standard library only."""
