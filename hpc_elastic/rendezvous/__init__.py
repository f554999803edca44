"""The nodes agree which of them are in a round, in which order, and when it is over.

`participant` is one node's part, stepped by `coordination`'s thread; `coordinator` decides, from a `cluster_view` to
`proposals` for the log of records (`state`). `handler` is the same rendezvous for agents that are not ours.
"""
