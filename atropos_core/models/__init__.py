"""What a model directory says of itself, and how computing on a CPU begins."""
