"""Where every buffer lies: a rectangle in time and memory."""
