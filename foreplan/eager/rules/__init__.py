"""PyTorch's ops: the tensors that each makes, what it saves for backward, and what its derivative makes.

elementwise  functions of each element, arithmetic, comparisons
shape        views, concatenation, sums over axes
contraction  products and convolutions
layers       normalisations, softmax, pooling, attention, embeddings, dropout
losses       those that PyTorch has an op for
"""
