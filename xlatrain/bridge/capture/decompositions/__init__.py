"""ATen ops in terms of others, while PyTorch captures: fewer and simpler ones have to be lowered. ``table.py`` has them all."""
