"""The report over a run: what failed first, why, and what was done about it. From the run directory alone."""
