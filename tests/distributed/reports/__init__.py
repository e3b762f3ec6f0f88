"""What users of other sharded trainers ran into: each test trains both ways, or wants the error."""
