"""The model states: what ZeRO partitions. One file a state, and the unit that holds one flat buffer's worth of each."""
