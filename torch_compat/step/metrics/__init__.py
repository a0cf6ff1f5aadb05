"""torchmetrics in captured steps, and over several processes."""
