"""What exporters do to a module, undone: a file's tensors and nodes as the module had them."""
