"""What fits a memory, what would make a step fit, why it needs what it needs, and what PyTorch needs: computed."""
