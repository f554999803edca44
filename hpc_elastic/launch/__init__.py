"""The batch side: a supervisor that starts one agent per node, and says what became of the run."""
