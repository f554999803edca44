"""Worker processes: spawn, stop, guard, and what they leave behind."""
