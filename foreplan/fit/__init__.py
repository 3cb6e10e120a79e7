"""What fits a memory, what would make a step fit, and why it needs what it needs: by compiling and planning it."""
