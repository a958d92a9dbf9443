"""The graph engine: GE graphs that torchair builds, decoded, checked and executed on CPU tensors."""
