"""Messages between processes of one machine, through shared memory."""
