"""The proof of a plan, and the check of a problem."""
