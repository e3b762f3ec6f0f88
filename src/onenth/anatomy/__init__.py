"""Where the memory of a step goes: recordings, and snapshots of the allocator."""
