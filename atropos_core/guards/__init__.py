"""What keeps code and processes of others from hanging or ending us: deadlines, contained exits, and patience with who owes an answer."""
