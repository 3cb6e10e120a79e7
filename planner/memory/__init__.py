"""What is alive when, in which bytes, and what no plan can go below."""
