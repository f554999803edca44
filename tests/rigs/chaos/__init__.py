"""Chaos: a real run on real processes, disturbed at random moments by a seeded schedule, and judged by its records.

``schedule``    seed → bursts of disturbances, each followed by a pause in which the run has to recover
``places``      where the nodes' files lie: ext4, emulated NFS, or whatever gives one path per node
``clusters``    the run under test: real agents with tiny workers under the real supervisor, or real handlers alone
``driver``      carries the schedule out, and watches the log of records from outside
``judge``       what must hold, from the records, the workers' journals and the events: a list of complaints

A failure prints its seed; ``python -m tests.rigs.chaos --seed N …`` replays that schedule.
"""
