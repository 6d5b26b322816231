"""Files and directories that are written whole, private and temporary ones, checkpoints."""
