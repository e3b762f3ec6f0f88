"""What users read: tables in the terminal."""
