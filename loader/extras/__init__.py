"""What only some trainings use, above the line: rehearsal and streams."""
