"""The calibration catalogue: failures that really happen, and whether the report names their cause."""
