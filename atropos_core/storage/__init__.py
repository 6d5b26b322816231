"""Files and directories that appear whole, private and temporary ones, checkpoints."""
