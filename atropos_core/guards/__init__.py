"""Keep components and other processes from hanging or ending this one: deadlines, contained exits, patience."""
