"""Reading a run's logs and events: while they grow, after the run's end, and where half of them are missing."""
