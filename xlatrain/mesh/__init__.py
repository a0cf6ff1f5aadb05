"""Meshes, how arrays are split over them, and how batches reach them."""
