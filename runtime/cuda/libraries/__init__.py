"""NVIDIA's libraries and driver: no other file calls them."""
