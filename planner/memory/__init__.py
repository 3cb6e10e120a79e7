"""Which values are live when, in which bytes, and lower bounds of plans."""
