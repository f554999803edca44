"""The nodes agree which of them are in a round, in which order, and when it is over.

- `state`: the record that they agree on, and the table of what may follow what. `round_log`: the log of records.
- `participant`: one node's part, stepped by `coordination`'s thread. `schedule`: when it looks and beats.
- `coordinator`: the decisions, from a `cluster_view` to `proposals`. `ranks`, `growth`, `preemption`: parts of them.
- `failure_detector`: which nodes live, are suspect, or are dead. `succession`: which node coordinates after a dead one.
- `handler`, `membership`, `run_folder`: the same rendezvous for agents that are not ours.
"""
