"""Stretches of a graph part by part: a `Tile` says what runs so, and `tiled` makes it.

tile.py        a tile, and the graph with it
search.py      the tiles of a stretch: along which axes, and what cannot do with a part
segments.py    tiles of stretches that a user names
samples.py     tiles that end in the loss: some samples, rows or logits at a time, forward and back
channels.py    tiles of what lies between convolutions
concats.py     convolutions over concatenated channels
stretches.py   tiles of inference, where most bytes are alive
live_bytes.py  the estimate of bytes by which these are chosen
"""
