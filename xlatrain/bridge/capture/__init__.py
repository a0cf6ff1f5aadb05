"""A PyTorch function → a pure graph of ATen ops."""
