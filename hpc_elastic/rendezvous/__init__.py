"""Which nodes are in a round, in which order, and when a round is over. See `state` for the record, `transitions` for
the table, `coordinator` for the decisions and `participant` for one node's part."""
