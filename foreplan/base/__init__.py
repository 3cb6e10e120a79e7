"""What all parts share: errors, units, files, checks of arguments."""
