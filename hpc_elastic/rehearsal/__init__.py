"""Rehearsals: a run with planted faults, which show whether the script really continues where it was."""
