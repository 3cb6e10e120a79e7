"""What each ATen op becomes, by subject."""
