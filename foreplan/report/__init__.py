"""What a planned step needs, as data and in words: its memory, its instructions, why, and whether it fits."""
